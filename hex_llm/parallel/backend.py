"""What kind of device programs are made for: the one that JAX runs on, or another that is only compiled for."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

_wanted: str | None = None


def backend() -> str:
    """cpu, gpu or tpu."""
    return _wanted or jax.default_backend()


@contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """For a process that compiles for devices it does not have; in all of its threads."""
    global _wanted
    before, _wanted = _wanted, name
    try:
        yield
    finally:
        _wanted = before
