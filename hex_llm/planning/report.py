"""A plan in words, and as JSON."""

from collections.abc import Sequence
from typing import Any

from hex_llm.catalog.chips import GIB
from hex_llm.planning.memory import lower_bound, on_gpu
from hex_llm.planning.model import Model
from hex_llm.planning.placement import Demand, chips_needed
from hex_llm.planning.plan import MEASURED, Row, command, recommended

SERVER = "python -m hex_llm.server.api_server"


def text(model: Model, demand: Demand, rows: Sequence[Row]) -> str:
    best = recommended(rows)
    flags = command(best, model)
    kept = model.precision.weights + (
        "" if model.precision.cache == "auto" else f", KV cache in {model.precision.cache}"
    )
    lines = [
        f"{model.name}: {model.parameters / 1e9:.2f}B parameters, {kept}",
        f"{demand.input_len} tokens in, {demand.output_len} out, {demand.concurrency} requests at once,"
        f" --max_model_len={demand.max_model_len}, --hbm_utilization_factor={demand.factor}",
        "",
        *_table(rows, demand, best),
        "",
        "TP: tensor_parallel_size. x: copies of the model. Weights and KV: GiB of a device. Seqs: of max_model_len that"
        " the KV cache holds, in each copy.",
        "Longest: max_model_len that one sequence could have. TTFT: of a request alone, and the median of all that run,"
        " at once. TPOT: with the prompts of others in between.",
        _reliability(rows),
        *_gains_nothing(model, rows),
        "",
        f"Recommended (*): {best.placement.slice.title}{_topology(best)}",
        "",
        f"  hex-llm serve {' '.join(flags)}",
        "",
        "or, as Hex-LLM's users write it:",
        "",
        *_wrapped(flags),
        "",
        *_checkpoint(model),
        "The five steps, with these numbers:",
        "",
        *_steps(model, demand, best),
    ]
    return "\n".join(lines)


def as_json(model: Model, demand: Demand, rows: Sequence[Row]) -> dict[str, Any]:
    shape = model.shape
    return {
        "model": model.name,
        "parameters": model.parameters,
        "weights": model.precision.weights,
        "kv_cache_dtype": model.precision.cache,
        "memory_lower_bound_bytes": lower_bound(model.parameters, model.precision),
        "context": shape.context,
        "input_len": demand.input_len,
        "output_len": demand.output_len,
        "concurrency": demand.concurrency,
        "max_model_len": demand.max_model_len,
        "hbm_utilization_factor": demand.factor,
        "recommended": rows.index(recommended(rows)),
        "rows": [_facts(row, model) for row in rows],
        "steps": _steps(model, demand, recommended(rows)),
    }


def _facts(row: Row, model: Model) -> dict[str, Any]:
    placement, room, found = row.placement, row.placement.room, row.estimate
    return {
        "accelerator": row.accelerator,
        "machine": placement.slice.machine,
        "hosts": placement.slice.hosts,
        "topology": placement.slice.topology,
        "devices": placement.slice.devices,
        "chips_lower_bound": chips_needed(model, placement.slice.chip.hbm),
        "tensor_parallel_size": placement.devices,
        "copies": placement.copies,
        "device_memory_bytes": room.usable,
        "weight_bytes_per_device": room.weights,
        "temporary_bytes_per_device": room.temporaries,
        "kv_cache_bytes_per_device": room.cache,
        "kv_cache_tokens": room.cache_tokens,
        "largest_max_model_len": room.longest,
        "running_requests": row.running,
        "output_tokens_per_second": found.tokens_per_second,
        "ttft_alone_s": found.first_token_alone,
        "ttft_all_at_once_median_s": found.first_token_together,
        "tpot_s": found.seconds_per_token,
        "efficiency_measured_here": row.accelerator == MEASURED and placement.devices == 1,
        "price_per_hour": row.price_per_hour,
        "cost_per_million_output_tokens": row.cost,
        "flags": row.flags,
        "command": " ".join(["hex-llm serve", *command(row, model)]),
    }


def _table(rows: Sequence[Row], demand: Demand, best: Row) -> list[str]:
    head = (
        "", "on", "machine", "topology", "TP", "x", "weights", "KV", "KV tokens", "seqs", "longest", "running",
        "tokens/s", "TTFT", "TPOT", "$/M tokens",
    )  # fmt: skip
    cells = [head, *(_cells(row, demand, row is best) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = 4  # columns of words; the others are numbers
    return [
        "  ".join(
            f"{cell:<{width}}" if i < left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _cells(row: Row, demand: Demand, best: bool) -> tuple[str, ...]:
    placement, room, found = row.placement, row.placement.room, row.estimate
    return (
        "*" if best else "",
        row.accelerator,
        placement.slice.title,
        placement.slice.topology or "",
        str(placement.devices),
        str(placement.copies),
        f"{room.weights / GIB:.2f}",
        f"{room.cache / GIB:.2f}",
        f"{room.cache_tokens:,}",
        f"{room.cache_tokens / demand.max_model_len:.1f}",
        f"{room.longest:,}",
        str(row.running),
        f"{found.tokens_per_second:,.0f}",
        f"{_seconds(found.first_token_alone)}, {_seconds(found.first_token_together)}",
        _seconds(found.seconds_per_token),
        "" if row.cost is None else f"{row.cost:.2f}",
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.{0 if seconds >= 0.1 else 1}f} ms"


def _topology(row: Row) -> str:
    placement = row.placement
    return f", topology {placement.slice.topology}" if placement.slice.hosts > 1 else ""


def _reliability(rows: Sequence[Row]) -> str:
    if all(row.accelerator == MEASURED and row.placement.devices == 1 for row in rows):
        return "Speeds: from shares of the roofline that were measured on one H200."
    return (
        "Speeds: from shares of the roofline that were measured on one H200; that other chips, and several, reach the"
        " same is an assumption."
    )


def _gains_nothing(model: Model, rows: Sequence[Row]) -> list[str]:
    on_tpus = [row for row in rows if not on_gpu(row.placement.slice.chip)]
    if model.precision.weights != "w4a8" or not on_tpus:
        return []
    return ["On TPUs w4a8 is as fast as int4: tokens are rounded to FP8, and then multiplied as they would have been."]


def _checkpoint(model: Model) -> list[str]:
    if not model.needs_other_files:
        return []
    return [f"--model must be a checkpoint that has {model.name} in AWQ: its own is in 16 bits.", ""]


def _wrapped(flags: Sequence[str]) -> list[str]:
    lines = [f"  {SERVER}", *(f"    {flag}" for flag in flags)]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _steps(model: Model, demand: Demand, best: Row) -> list[str]:
    placement, room, precision = best.placement, best.placement.room, model.precision
    chip = placement.slice.chip
    bound, memory = lower_bound(model.parameters, precision) / 1e9, chip.hbm / GIB
    real = f"; with scales, and what stays in 16 bits, {room.weights * placement.devices / 1e9:.1f} GB"
    copies = f", {placement.copies} copies" if placement.copies > 1 else ""
    most = placement.max_decode_seqs * demand.max_model_len
    enough = f", all that {placement.max_decode_seqs} sequences can use" if room.cache_tokens >= most else ""
    return [
        f"1. Model: {model.name}, {model.parameters / 1e9:.2f}B parameters.",
        f"2. Memory at least: {model.parameters / 1e9:.2f} * ({precision.nominal_bits} / 8) = {bound:.1f} GB"
        f"{real if precision.nominal_bits < 16 else ''}.",
        f"3. Devices: more than {bound:.1f} / {memory:.4g} = {chips_needed(model, chip.hbm):.2f} of {best.accelerator}."
        f" The smallest that has them, and room to work: {placement.slice.title},"
        f" --tensor_parallel_size={placement.devices}{copies}.",
        f"4. Length: --max_model_len={demand.max_model_len}. One sequence could have {room.longest:,}; the model was"
        f" made for {model.shape.context:,}.",
        f"5. KV cache: --hbm_utilization_factor={demand.factor} of the {_free(best):.2f} GiB that are free on a device:"
        f" {room.cache_tokens:,} tokens{enough}. Test it with long prompts and {demand.concurrency} requests at once;"
        " if memory runs out, lower it.",
    ]


def _free(row: Row) -> float:
    room = row.placement.room
    return (room.usable - room.weights - room.temporaries) / GIB
