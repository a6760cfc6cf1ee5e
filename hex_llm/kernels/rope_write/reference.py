"""What becomes of a step's queries, keys and values before attention, in plain JAX."""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.matmul.reference import total
from hex_llm.kernels.paged_attention.pages import Pages, write_pages
from hex_llm.kernels.rms import Rms, rms_norm


def rope_write(
    parts: Array,  # [n, T, (N + 2K) * H]
    tables: tuple[Array, Array] | None,  # [T, 1, H/2] float32 each; None: heads are not rotated
    pages: Pages,  # [P, 2, K, page, H]
    batch: Batch,
    dtype: jnp.dtype,
    *,
    bias: Array | None = None,  # [(N + 2K) * H]
    norms: tuple[Array, Array] | None = None,  # of queries and of keys: [H] each
    rms: Rms | None = None,  # how they normalise
) -> tuple[Array, Pages]:
    """The rotated queries [T, N, H], and the pages with the rotated keys and the values written to them.

    `parts` and the bias add up to the queries, keys and values, which are rounded to `dtype` then; where there are
    norms, each head of queries and keys is normalised before it is rotated. More than T rows of `parts` may be given;
    those past T mean nothing.
    """
    q, k, v = heads(parts, tables, pages, batch, dtype, bias=bias, norms=norms, rms=rms)
    return q, write_pages(pages, k, v, batch)


def heads(
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
) -> tuple[Array, Array, Array]:
    """Those of queries, and of the keys and values that are to be written."""
    q, k, v = split(parts, pages, batch, dtype, bias, head_dim)
    if norms is not None:
        assert rms is not None, "norms need to be told how"
        q, k = rms_norm(q, norms[0], rms), rms_norm(k, norms[1], rms)
    if tables is not None:
        q, k = rotate(q, tables), rotate(k, tables)
    return q, k, v


def split(
    parts: Array, pages: Pages, batch: Batch, dtype: jnp.dtype, bias: Array | None = None, head_dim: int | None = None
) -> tuple[Array, Array, Array]:
    """The heads of queries [T, N, H], keys and values [T, K, H]. `head_dim` where pages are wider than that."""
    num_tokens = batch.write_page.shape[0]
    # Counted from the arrays at hand: a shard of the model holds a part of the heads.
    num_kv_heads, head_dim = pages.shape[2], head_dim or pages.shape[4]
    qkv = total(parts)[:num_tokens]
    if bias is not None:
        qkv = qkv.astype(jnp.float32) + bias.astype(jnp.float32)[None, :]
    qkv = qkv.astype(dtype).reshape(num_tokens, -1, head_dim)
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    return qkv[:, :num_heads], qkv[:, num_heads:-num_kv_heads], qkv[:, -num_kv_heads:]


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """[T, N, H] heads, each turned by the angle of its token's position."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
