"""The reach of a row's draw, by the best implementation there is for the machine."""

from jax import Array

from hex_llm.kernels.hopper import is_hopper
from hex_llm.kernels.reach import halving, reference
from hex_llm.kernels.reach.filters import Filters
from hex_llm.parallel.backend import backend

BEST = {"cpu": "halving", "gpu": "reference", "tpu": "reference"}  # where it is no Hopper GPU


def reach(logits: Array, filters: Filters, *, implementation: str | None = None) -> Array:
    """See `reference.reach` for what it computes."""
    match implementation or ("gpu" if is_hopper() else BEST[backend()]):
        case "reference":
            return reference.reach(logits, filters)
        case "halving":
            return halving.reach(logits, filters)
        case "gpu":
            # Imported where it is used: Pallas takes a second, which a start on a CPU has better use for.
            from hex_llm.kernels.reach import gpu

            return gpu.reach(logits, filters)
        case name:
            raise ValueError(f"there is no implementation {name!r}")
