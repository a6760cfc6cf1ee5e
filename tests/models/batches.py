"""Batches made by hand, and a model run on them: what the runner does, said plainly."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.models import decoder
from hex_llm.models.arch import Arch


def empty_pages(arch: Arch, *, num_pages: int, page_size: int, dtype=jnp.float32) -> tuple[Array, ...]:
    shape = (num_pages, 2, arch.num_kv_heads, page_size, arch.head_dim)
    return tuple(jnp.zeros(shape, dtype) for _ in range(arch.num_layers))


def make_batch(slices: Sequence[tuple[Sequence[int], int, Sequence[int]]], *, page_size: int, num_tokens: int) -> Batch:
    """Each slice is (tokens, position of the first, the pages of its sequence); those of one token come first.

    The batch is padded to `num_tokens`.
    """
    width = max(len(pages) for _, _, pages in slices)
    tokens, positions, write_page, write_offset, cu_q, kv_len = [], [], [], [], [0], []
    for own, start, pages in slices:
        for position, token in enumerate(own, start=start):
            tokens.append(token)
            positions.append(position)
            write_page.append(pages[position // page_size])
            write_offset.append(position % page_size)
        cu_q.append(len(tokens))
        kv_len.append(start + len(own))
    table = [[*pages, *[0] * (width - len(pages))] for _, _, pages in slices]
    num_decode = next((i for i, (own, _, _) in enumerate(slices) if len(own) > 1), len(slices))
    padded = (
        np.pad(np.array(x, np.int32), (0, num_tokens - len(x))) for x in (tokens, positions, write_page, write_offset)
    )
    return Batch(
        *(jnp.asarray(x) for x in padded),
        *(jnp.asarray(np.array(x, np.int32)) for x in (cu_q, kv_len, table, num_decode, len(slices))),
    )


@partial(jax.jit, static_argnames="arch")
def run(model, kv, batch, *, arch):
    """The logits of every token of the batch, and the pages after it."""
    hidden, kv = decoder.forward(model, arch, kv, batch)
    return decoder.logits(model, arch, hidden), kv
