"""A model on every accelerator that holds it: where, how fast, at what cost; and which of them to take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hex_llm.config import Config
from hex_llm.errors import ConfigError, OutOfMemory
from hex_llm.flags import flags_of
from hex_llm.planning.model import Model
from hex_llm.planning.placement import DEFAULT_DECODE_SEQS, Demand, Placement, candidates, place
from hex_llm.planning.throughput import Devices, Estimate, Load, decode_seconds, estimate, prefill_seconds

# The accelerator whose shares of the roofline were measured (`efficiency`).
MEASURED = "h200"


@dataclass(frozen=True, slots=True)
class Row:
    accelerator: str
    placement: Placement
    running: int  # requests that are answered at once, on all copies together
    estimate: Estimate  # of all copies together
    price_per_hour: float | None
    flags: dict[str, Any]  # of the server, as `Config` names them

    @property
    def cost(self) -> float | None:
        """Of a million tokens of output, where the price is known."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour / (self.estimate.tokens_per_second * 3600) * 1e6


def plan(
    model: Model,
    demand: Demand,
    accelerators: Sequence[str],
    *,
    machine: str | None = None,
    devices: int | None = None,
    price_per_hour: float | None = None,
) -> list[Row]:
    """A row for each accelerator that holds the model, in the order given. Fails where none does."""
    if demand.max_model_len > model.shape.context:
        raise ConfigError(
            f"--max_model_len={demand.max_model_len} is more than {model.name} was made for: {model.shape.context}."
        )
    rows = [
        _row(model, demand, accelerator, found, price_per_hour)
        for accelerator in accelerators
        if (found := place(model, accelerator, demand, machine=machine, devices=devices))
    ]
    if rows:
        return rows
    where = machine or ", ".join(accelerators)
    sharing = f" with --tensor_parallel_size={devices}" if devices else ""
    if demand.disagg is not None:
        sharing += f" and --disagg_topo={demand.disagg[0]},{demand.disagg[1]}"
    if not any(next(candidates(each, demand, machine=machine, devices=devices), None) for each in accelerators):
        raise ConfigError(
            f"No machine of {where} has work for all its devices{sharing}: they must be a copy's devices times the"
            " copies, or the workers."
        )
    raise OutOfMemory(
        f"{model.name} in {model.precision.weights} with --max_model_len={demand.max_model_len} fits on no machine of"
        f" {where}{sharing}. Fewer bits (--quantization, --kv_cache_dtype), a shorter --max_model_len, fewer requests"
        " or another machine may help."
    )


def recommended(rows: Sequence[Row]) -> Row:
    """The cheapest by the token, of those whose price is known; else the one with the most tokens of a device."""
    priced = [row for row in rows if row.cost is not None]
    if priced:
        return min(priced, key=lambda row: row.cost or 0)
    return max(rows, key=lambda row: row.estimate.tokens_per_second / row.placement.slice.devices)


def command(row: Row, model: Model) -> list[str]:
    """The flags as one would type them, the model first."""
    by_name = {flag.name: flag for flag in flags_of(Config)}
    return [f"--model={model.name}", *(by_name[name].show(value) for name, value in row.flags.items())]


def _row(model: Model, demand: Demand, accelerator: str, placement: Placement, price: float | None) -> Row:
    devices = Devices(model.shape, model.precision, placement.slice.chip, placement.devices)
    serving = placement.copies if demand.disagg is None else demand.disagg[1]
    held = max(placement.room.cache_tokens // (demand.input_len + demand.output_len), 1)
    of_each = min(-(-demand.concurrency // serving), held, placement.max_decode_seqs)
    running = min(of_each * serving, demand.concurrency)
    if demand.disagg is None:
        each = estimate(devices, Load(demand.input_len, demand.output_len, of_each))
        found = replace(each, tokens_per_second=running / each.seconds_per_token)
    else:
        found = _apart(devices, demand, demand.disagg, of_each, running)
    return Row(
        accelerator=accelerator,
        placement=placement,
        running=running,
        estimate=found,
        price_per_hour=placement.slice.price_per_hour if price is None else price,
        flags=_flags(model, demand, placement),
    )


def _apart(devices: Devices, demand: Demand, workers: tuple[int, int], of_each: int, running: int) -> Estimate:
    """Workers for prompts and workers for answers: those that are slower bound the others."""
    prompts, _ = workers
    prompt = prefill_seconds(devices, demand.input_len)
    step = decode_seconds(devices, of_each, demand.input_len + demand.output_len / 2)
    return Estimate(
        tokens_per_second=min(running / step, prompts * demand.output_len / prompt),
        seconds_per_token=step,
        first_token_alone=prompt,
        first_token_together=prompt * (running / prompts + 1) / 2,
    )


def _flags(model: Model, demand: Demand, placement: Placement) -> dict[str, Any]:
    """What differs from the server's defaults, and what the steps of the workflow set."""
    flags: dict[str, Any] = {"tensor_parallel_size": placement.devices}
    if demand.disagg is not None:
        flags["disagg_topo"] = f"{demand.disagg[0]},{demand.disagg[1]}"
    elif placement.copies > 1:
        flags["data_parallel_size"] = placement.copies
    if placement.slice.hosts > 1:
        flags["num_hosts"] = placement.slice.hosts
    flags |= {"max_model_len": demand.max_model_len, "hbm_utilization_factor": demand.factor}
    if model.flag is not None:
        flags["quantization"] = model.flag
    if model.precision.cache != "auto":
        flags["kv_cache_dtype"] = model.precision.cache
    if placement.max_decode_seqs > DEFAULT_DECODE_SEQS:
        flags["max_decode_seqs"] = placement.max_decode_seqs
    return flags | {"enable_chunked_prefill": True}
