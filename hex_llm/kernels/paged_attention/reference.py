"""What paged attention means, in plain JAX. Every other implementation is tested against it.

It gathers the whole context of every token, which no real batch can afford.
"""

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention.pages import Pages, value, write_pages
from hex_llm.kernels.window import Window


def paged_attention(
    q: Array,  # [T, N, H]
    k: Array,  # [T, K, H]
    v: Array,  # [T, K, H]
    pages: Pages,  # [P, 2, K, page, H]
    batch: Batch,
    *,
    scale: float,
    window: Window | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,  # [N]
) -> tuple[Array, Pages]:
    """Writes the step's keys and values, then attends."""
    pages = write_pages(pages, k, v, batch)
    return attend(q, pages, batch, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks), pages


def attend(
    q: Array,  # [T, N, H]
    pages: Pages,  # [P, 2, K, page, H], with the step's keys and values
    batch: Batch,
    *,
    scale: float,
    window: Window | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,  # [N]
) -> Array:
    """Lets each token attend to its sequence up to itself: [T, N, H].

    With a `window` it attends to the tokens in that. A head's sink is a score like those of the tokens, but without a
    value: it takes its share of the weight. It is neither scaled nor capped. The rows of padding tokens mean nothing.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = pages.shape[2]
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = tokens if batch.cu_q is None else jnp.searchsorted(batch.cu_q[1:], tokens, side="right")
    owner = jnp.minimum(owner, batch.kv_len.shape[0] - 1)
    context = value(jax.tree.map(lambda each: each[batch.page_table[owner]], pages))  # T B 2 K page H
    context = jnp.moveaxis(context, 1, 3).reshape(num_tokens, 2, num_kv_heads, -1, head_dim)
    context = context.astype(jnp.float32)
    grouped = q.reshape(num_tokens, num_kv_heads, -1, head_dim).astype(jnp.float32)
    scores = jnp.einsum("tkgh,tkch->tkgc", grouped, context[:, 0]) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    key, position = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, :], batch.positions[:, None]
    seen = key <= position
    if window is not None:
        seen &= key >= window.first(position)
    scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
    # What is not seen may be anything, also NaN, which a weight of 0 would not take away: past its sequence's end, and
    # before a window, a page may hold what others left there.
    values = jnp.where(seen[:, None, :, None], context[:, 1], 0)
    if sinks is not None:
        column = sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1)
        scores = jnp.concatenate([jnp.broadcast_to(column, (*scores.shape[:-1], 1)), scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., -values.shape[2] :]
    out = jnp.einsum("tkgc,tkch->tkgh", weights, values)
    return out.reshape(num_tokens, num_heads, head_dim).astype(q.dtype)
