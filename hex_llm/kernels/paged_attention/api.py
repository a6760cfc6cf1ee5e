"""Paged attention, by the best implementation there is for the machine."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.hopper import is_hopper
from hex_llm.kernels.paged_attention import reference, xla
from hex_llm.kernels.paged_attention.write import write_pages
from hex_llm.kernels.window import Window
from hex_llm.parallel.backend import backend

BEST = {"cpu": "xla", "gpu": "xla", "tpu": "xla"}  # where it is no Hopper GPU


def prepare(batch: Batch, q: Any, pages: Any, windows: Iterable[Window | None]) -> Batch:
    """The batch, with what its layers' attention can share computed once. `q` [T, N, H] and `pages` are the arrays of
    any layer, or their shapes."""
    if _best() != "gpu":
        return batch
    from hex_llm.kernels.paged_attention import gpu

    return dataclasses.replace(batch, plans=gpu.plans(batch, q, pages, windows))


def paged_attention(
    q: Array, k: Array, v: Array, pages: Array, batch: Batch, *, implementation: str | None = None, **options: Any
) -> tuple[Array, Array]:
    """See `reference.paged_attention` for what it computes."""
    pages = write_pages(pages, k, v, batch)
    return attend(q, pages, batch, implementation=implementation, **options), pages


def attend(q: Array, pages: Array, batch: Batch, *, implementation: str | None = None, **options: Any) -> Array:
    """See `reference.attend` for what it computes. Rows that mean nothing may follow those of `q`."""
    return _implementation(implementation or _best())(q, pages, batch, **options)


def _best() -> str:
    return "gpu" if is_hopper() else BEST[backend()]


def _implementation(name: str) -> Callable:
    match name:
        case "reference":
            return reference.attend
        case "xla":
            return xla.attend
        case "gpu":
            # Imported where it is used: Pallas takes a second, which a start on a CPU has better use for.
            from hex_llm.kernels.paged_attention import gpu

            return gpu.attend
    raise ValueError(f"there is no implementation {name!r}")
