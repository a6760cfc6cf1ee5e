"""Paged attention, by the best implementation there is for the machine."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.hopper import is_hopper
from hex_llm.kernels.paged_attention import pages as plain
from hex_llm.kernels.paged_attention import reference, xla
from hex_llm.kernels.paged_attention.pages import Pages
from hex_llm.kernels.quant_matmul.rows import EightBits, Rows, Tokens
from hex_llm.kernels.window import Window
from hex_llm.parallel.backend import backend

TPU_LANES = 128
BEST = {"cpu": "xla", "gpu": "xla", "tpu": "tpu"}  # where it is no Hopper GPU


def prepare(batch: Batch, q: Any, pages: Any, windows: Iterable[Window | None]) -> Batch:
    """The batch, with what its layers' attention can share computed once. `q` [T, N, H] and `pages` are the arrays of
    any layer, or their shapes."""
    match _best():
        case "gpu":
            from hex_llm.kernels.paged_attention.gpu import plans
        case "tpu":
            from hex_llm.kernels.paged_attention.tpu import plans
        case _:
            return batch
    return dataclasses.replace(batch, plans=plans(batch, q, pages, windows))


def page_width(head_dim: int) -> int:
    """Numbers that pages have for each head of a token: those past `head_dim` mean nothing.

    A TPU keeps whole tiles of its memory anyway. Of pages whose heads fill none, XLA would make something else, and
    turn all of them into what the kernels take, and back, in every layer.
    """
    return -(-head_dim // TPU_LANES) * TPU_LANES if _best() == "tpu" else head_dim


def write_pages(pages: Pages, k: Array, v: Array, batch: Batch, *, implementation: str | None = None) -> Pages:
    """See `pages.write_pages` for what it does; what becomes of page 0 means nothing."""
    if (implementation or _best()) == "tpu":
        from hex_llm.kernels.paged_attention import tpu

        return tpu.write_pages(pages, k, v, batch)
    return plain.write_pages(pages, k, v, batch)


def paged_attention(
    q: Array, k: Array, v: Array, pages: Pages, batch: Batch, *, implementation: str | None = None, **options: Any
) -> tuple[Array, Pages]:
    """See `reference.paged_attention` for what it computes."""
    pages = write_pages(pages, k, v, batch, implementation=implementation)
    return attend(q, pages, batch, implementation=implementation, **options), pages


def attend(q: Array, pages: Pages, batch: Batch, *, implementation: str | None = None, **options: Any) -> Array:
    """See `reference.attend` for what it computes. Rows that mean nothing may follow those of `q`."""
    return _implementation(implementation or _best())(q, pages, batch, **options)


def attend_tokens(q: Any, pages: Pages, batch: Batch, *, eight_bits: EightBits | None, **options: Any) -> Tokens:
    """As `attend`, for queries as `rope_write` gives them: [T or more, N * H], maybe in the 8 bits asked for."""
    if _best() == "gpu":
        options["eight_bits"] = eight_bits
    out = attend(q, pages, batch, **options)
    return out if isinstance(out, Rows) else out.reshape(out.shape[0], -1)


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
        case "tpu":
            from hex_llm.kernels.paged_attention import tpu

            return tpu.attend
    raise ValueError(f"there is no implementation {name!r}")
