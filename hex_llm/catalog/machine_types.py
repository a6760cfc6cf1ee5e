"""What can be rented, and what it has: machines as Google Cloud names them, one by one or several as one slice.

Of v5e as in docs.cloud.google.com/tpu/docs/v5e, and v6e up to eight chips as in the guides of Hex-LLM and of vLLM on
TPUs; sixteen chips of v5e are four machines there. The others are named as in
cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and
docs.cloud.google.com/compute/docs/accelerator-optimized-machines, but were not compared line by line.
The H200 comes in eights; `h200x1` and its like stand for cards that somebody has otherwise.

Prices are those of cloud.google.com/tpu/pricing, on demand in the United States, as others quote them (v5e on 31
January 2025; of v5p and v6e no day is given); the page itself was not read for this. They change, and other regions
have others. No price of a GPU is here: none was at hand with a source.
"""

import math
from dataclasses import dataclass

from hex_llm.catalog.chips import CHIPS, Chip


@dataclass(frozen=True, slots=True)
class Slice:
    """Machines of one type whose devices work together."""

    machine: str
    chip: Chip
    devices: int  # in all
    hosts: int = 1
    topology: str | None = None  # None: all devices are on one switch
    price_per_hour: float | None = None  # of all machines together, in US dollars

    @property
    def title(self) -> str:
        return self.machine if self.hosts == 1 else f"{self.hosts} x {self.machine}"


def _tpu(
    chip: str, machine: str, *shapes: str, chips: int, devices_of_chip: int = 1, price: float | None = None
) -> tuple[Slice, ...]:
    """Slices of a machine with so many chips; `price` is a chip's."""
    slices = []
    for shape in shapes:
        count = math.prod(map(int, shape.split("x")))
        whole = None if price is None else price * count
        slices.append(Slice(machine, CHIPS[chip], count * devices_of_chip, count // chips, shape, whole))
    return tuple(slices)


_V5E, _V5P, _V6E = 1.20, 4.20, 2.70  # dollars an hour, a chip

# The slices of an accelerator, the smallest first.
SLICES: dict[str, tuple[Slice, ...]] = {
    "v5e": (
        *_tpu("v5e", "ct5lp-hightpu-1t", "1x1", chips=1, price=_V5E),
        *_tpu("v5e", "ct5lp-hightpu-4t", "2x2", chips=4, price=_V5E),
        *_tpu("v5e", "ct5lp-hightpu-8t", "2x4", chips=8, price=_V5E),
        *_tpu("v5e", "ct5lp-hightpu-4t", "4x4", "4x8", "8x8", chips=4, price=_V5E),
    ),
    "v6e": (
        *_tpu("v6e", "ct6e-standard-1t", "1x1", chips=1, price=_V6E),
        *_tpu("v6e", "ct6e-standard-4t", "2x2", chips=4, price=_V6E),
        *_tpu("v6e", "ct6e-standard-8t", "2x4", chips=8, price=_V6E),
        *_tpu("v6e", "ct6e-standard-4t", "4x4", "4x8", "8x8", chips=4, price=_V6E),
    ),
    "v5p": _tpu("v5p", "ct5p-hightpu-4t", "2x2x1", "2x2x2", "2x2x4", "2x4x4", chips=4, price=_V5P),
    "v4": _tpu("v4", "ct4p-hightpu-4t", "2x2x1", "2x2x2", "2x2x4", "2x4x4", chips=4),
    "tpu7x": _tpu("tpu7x", "tpu7x-standard-4t", "2x2x1", "2x2x2", "2x2x4", chips=4, devices_of_chip=2),
    "h100": tuple(Slice(f"a3-highgpu-{count}g", CHIPS["h100"], count) for count in (1, 2, 4, 8)),
    "h200": (
        *(Slice(f"h200x{count}", CHIPS["h200"], count) for count in (1, 2, 4)),
        Slice("a3-ultragpu-8g", CHIPS["h200"], 8),
    ),
}
