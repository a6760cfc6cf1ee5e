"""Which machine holds a model, and how its devices are shared out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hex_llm.catalog.chips import GIB
from hex_llm.catalog.machine_types import SLICES, Slice
from hex_llm.config import Config
from hex_llm.flags import flags_of
from hex_llm.planning.memory import Room, lower_bound, plan_room
from hex_llm.planning.model import Model

# A server that answers fewer requests at once wastes what reading the weights costs.
LEAST_TOGETHER = 8
DEFAULT_DECODE_SEQS: int = next(flag.default for flag in flags_of(Config) if flag.name == "max_decode_seqs")
# The most that the guides set, and that was measured. Each one more takes memory for its logits, so others wait.
MOST_DECODE_SEQS = 512


@dataclass(frozen=True, slots=True)
class Demand:
    """What has to fit."""

    input_len: int
    output_len: int
    concurrency: int
    max_model_len: int
    factor: float  # --hbm_utilization_factor
    disagg: tuple[int, int] | None = None  # workers for prompts, and for answers

    @property
    def workers(self) -> int | None:
        return None if self.disagg is None else sum(self.disagg)


@dataclass(frozen=True, slots=True)
class Placement:
    slice: Slice
    devices: int  # of one copy: tensor_parallel_size
    copies: int  # of the model: data_parallel_size, or all workers of --disagg_topo
    max_decode_seqs: int
    room: Room


def place(
    model: Model, accelerator: str, demand: Demand, *, machine: str | None = None, devices: int | None = None
) -> Placement | None:
    """The smallest slice that holds the model and has work for all its devices; None: there is none."""
    tried = candidates(accelerator, demand, machine=machine, devices=devices)
    return next((found for slice, size in tried if (found := _fit(model, slice, size, demand))), None)


def candidates(
    accelerator: str, demand: Demand, *, machine: str | None = None, devices: int | None = None
) -> Iterator[tuple[Slice, int]]:
    """Slices, the smallest first, each with the devices that a copy of the model may have there."""
    for slice in SLICES[accelerator]:
        if machine is not None and slice.machine != machine:
            continue
        for size in [devices] if devices else copy_sizes(accelerator, apart=demand.disagg is not None):
            copies, rest = divmod(slice.devices, size)
            if rest or not copies or demand.workers not in (None, copies):
                continue
            if slice.hosts > 1 and copies > 1:  # several hosts hold one copy
                continue
            yield slice, size


def copy_sizes(accelerator: str, *, apart: bool) -> list[int]:
    """How many devices a copy may have, the fewest first: as many as a slice, so that it is rented alone; and where the
    smallest slice has several, or workers share one (`apart`), powers of two."""
    slices = [each.devices for each in SLICES[accelerator]]
    below = max(slices) if apart else min(slices)
    return sorted({*slices, *(2**power for power in range(below.bit_length()) if 2**power < below)})


def chips_needed(model: Model, chip_memory: int) -> float:
    """As the guides reckon it: GB of weights over a chip's memory, of which a slice must have more."""
    return lower_bound(model.parameters, model.precision) / 1e9 / (chip_memory / GIB)


def accelerators_of(machine: str) -> Iterable[str]:
    return (name for name, slices in SLICES.items() if any(each.machine == machine for each in slices))


def _fit(model: Model, slice: Slice, devices: int, demand: Demand) -> Placement | None:
    if chips_needed(model, slice.chip.hbm) >= devices:
        return None
    copies = slice.devices // devices
    serving = copies if demand.disagg is None else demand.disagg[1]
    share = -(-demand.concurrency // serving)
    max_decode_seqs = min(max(DEFAULT_DECODE_SEQS, share), MOST_DECODE_SEQS)
    room = plan_room(
        model.shape,
        model.precision,
        slice.chip,
        devices,
        factor=demand.factor,
        max_model_len=demand.max_model_len,
        max_decode_seqs=max_decode_seqs,
    )
    together = min(share, LEAST_TOGETHER) * (demand.input_len + demand.output_len)
    if room.cache_tokens < max(demand.max_model_len, together):
        return None
    return Placement(slice, devices, copies, max_decode_seqs, room)
