"""Rotating a step's queries and keys, and writing its keys and values to their pages."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.chain import chained
from hex_llm.kernels.paged_attention.api import write_pages
from hex_llm.kernels.paged_attention.pages import Pages
from hex_llm.kernels.rms import Rms
from hex_llm.kernels.rope_write import reference


def rope_write(
    parts: Array,
    tables: tuple[Array, Array] | None,
    pages: Pages,
    batch: Batch,
    dtype: jnp.dtype,
    *,
    bias: Array | None = None,
    norms: tuple[Array, Array] | None = None,
    rms: Rms | None = None,
    head_dim: int | None = None,
) -> tuple[Any, Pages]:
    """See `reference.rope_write` for what it computes. The queries are for attention alone, and may come as it wants to
    have them. `head_dim` where pages are wider than that."""
    if chained(parts.shape[1]):
        # Imported where it is used: Pallas takes a second, which a start on a CPU has better use for.
        from hex_llm.kernels.rope_write import gpu

        if gpu.supports(parts, pages, dtype):
            places = batch.write_page, batch.write_offset
            more = {"bias": bias, "norms": norms, "rms": rms, "decode": batch.cu_q is None}
            return gpu.rope_write(parts, tables, pages, *places, dtype, **more)
    q, k, v = reference.heads(parts, tables, pages, batch, dtype, bias=bias, norms=norms, rms=rms, head_dim=head_dim)
    return q, write_pages(pages, k, v, batch)
