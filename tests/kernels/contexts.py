"""Pages of keys and values as sequences leave them, and what queries attend to in them."""

import jax.numpy as jnp
import numpy as np

from hex_llm.kernels.paged_attention.pages import Pages, rounded, value
from hex_llm.kernels.window import Window

SCALE = 0.1


def random_pages(rng, lengths, *, kv_heads, head_dim, page_size, dtype):
    """Pages and their table; what no sequence has written is NaN. Of int8 the numbers that those pages stand for, as
    NumPy has no pages with scales."""
    counts = -(-np.asarray(lengths) // page_size)
    table = np.zeros((len(lengths), max(counts) + 2), np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = rng.permutation(np.arange(1, counts.sum() + 1))
    pages = np.full((counts.sum() + 1, 2, kv_heads, page_size, head_dim), np.nan, np.float32)
    for row, length in zip(table, lengths, strict=True):
        for position in range(length):
            page = row[position // page_size]
            pages[page, :, :, position % page_size] = rng.standard_normal((2, kv_heads, head_dim))
    if dtype == np.int8:
        pages *= rng.uniform(0.1, 1, (*pages.shape[:-1], 1))  # unlike scales, so that a wrong one shows
        return np.asarray(value(rounded(jnp.asarray(pages), dtype))), table
    return pages.astype(dtype), table


def kept(pages, dtype) -> Pages:
    """Those of `random_pages`, as kernels get them."""
    return rounded(jnp.asarray(pages), jnp.int8) if dtype == np.int8 else jnp.asarray(pages)


def expected(q, pages, table, new, old, *, window=None, soft_cap=None, sinks=None):
    """[T, N, H]: attention of the `new` tokens of each sequence after `old` ones; 0 where it has none."""
    num_heads, head_dim = q.shape[1:]
    kv_heads, page_size = pages.shape[2:4]
    out, start = np.zeros(q.shape, np.float32), 0
    for s, (n, o) in enumerate(zip(new, old, strict=True)):
        length, rows = n + o, slice(start, start + n)
        start += n
        if not n or not length:
            continue
        context = np.moveaxis(pages[table[s, : -(-length // page_size)]], 0, 2).astype(np.float32)
        keys, values = context.reshape(2, kv_heads, -1, head_dim)[:, :, :length].repeat(num_heads // kv_heads, axis=1)
        scores = q[rows].astype(np.float32).swapaxes(0, 1) @ keys.swapaxes(1, 2) * SCALE
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        scores = np.where(seen_by(o + np.arange(n), length, window), scores, -np.inf)
        if sinks is not None:
            column = np.asarray(sinks, np.float32)[:, None, None]
            scores = np.concatenate([scores, np.broadcast_to(column, (*scores.shape[:2], 1))], axis=-1)
            values = np.pad(values, ((0, 0), (0, 1), (0, 0)))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[rows] = (weights / weights.sum(axis=-1, keepdims=True) @ values).swapaxes(0, 1)
    return out


def spoil_unseen(pages, table, new, old, window):
    """The pages with NaN where none of the new tokens sees: the page may be another sequence's by now."""
    pages, page_size = pages.copy(), pages.shape[3]
    for row, n, o in zip(table, new, old, strict=True):
        for position in np.flatnonzero(~seen_by(o + np.arange(n), n + o, window).any(axis=0)) if n else ():
            pages[row[position // page_size], :, :, position % page_size] = np.nan
    return pages


def seen_by(positions, length, window):
    """Which of `length` tokens those at `positions` see."""
    position, key = np.asarray(positions)[:, None], np.arange(length)
    seen = key <= position
    match window:
        case Window(size, chunked=False):
            seen &= position - key < size
        case Window(size, chunked=True):
            seen &= position // size == key // size
    return seen
