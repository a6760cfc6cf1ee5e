"""What a device says when it has no memory left, as an error of ours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from hex_llm import faults

_WORD = "RESOURCE_EXHAUSTED"


@contextmanager
def asking(error: Callable[[str], Exception]) -> Iterator[None]:
    """Raises `error` of what the device says, where something within asks for more memory than there is."""
    try:
        yield
    except jax.errors.JaxRuntimeError as said:
        if _WORD not in str(said):
            raise
        raise error(str(said).strip().partition("\n")[0]) from said


def reach(point: str) -> None:
    """A point at which HEX_LLM_FAULTS may have the device's memory run out."""
    if faults.reach(point) == faults.OUT_OF_MEMORY:
        raise jax.errors.JaxRuntimeError(f"{_WORD}: {faults.VARIABLE} wants {point} to find no memory.")
