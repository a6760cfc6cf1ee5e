"""What becomes of a step's queries, keys and values before attention, in plain JAX."""

import functools

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention.write import write_pages


def rope_write(
    parts: Array,  # [n, T, (N + 2K) * H]
    tables: tuple[Array, Array],  # [T, 1, H/2] float32 each
    pages: Array,  # [P, 2, K, page, H]
    batch: Batch,
    dtype: jnp.dtype,
) -> tuple[Array, Array]:
    """The rotated queries [T, N, H], and the pages with the rotated keys and the values written to them.

    `parts` add up to the queries, keys and values, which are rounded to `dtype` then. More than T rows of them may be
    given; those past T mean nothing.
    """
    num_tokens = batch.write_page.shape[0]
    # Counted from the arrays at hand: a shard of the model holds a part of the heads.
    num_kv_heads, head_dim = pages.shape[2], pages.shape[4]
    qkv = functools.reduce(jnp.add, [parts[i] for i in range(parts.shape[0])]).astype(dtype)
    qkv = qkv[:num_tokens].reshape(num_tokens, -1, head_dim)
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = qkv[:, :num_heads], qkv[:, num_heads:-num_kv_heads], qkv[:, -num_kv_heads:]
    return rotate(q, tables), write_pages(pages, rotate(k, tables), v, batch)


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """[T, N, H] heads, each turned by the angle of its token's position."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
