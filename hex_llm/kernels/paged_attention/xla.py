"""Paged attention in plain XLA, with work in proportion to the batch: it serves the CPU.

Loops with run-time bounds walk over the keys in chunks and keep a running softmax, so neither the length of the
page table nor the padding of the batch costs anything, and no shape but the token count is compiled for.

Sequences of one token (decodes) are taken several at a time, each against its own pages. The others (prompts, and
parts of prompts) go one by one, in tiles of queries that share the keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention.pages import Pages, value
from hex_llm.kernels.window import Window

CHUNK = 256  # keys a loop turn looks at
DECODE_ROWS = 8  # decodes a loop turn looks at
QUERY_TILE = 128  # queries of one sequence a loop turn looks at
LOWEST = -1e30  # finite: an all-masked chunk must not make NaN


class Softmax(NamedTuple):
    """A softmax-weighted sum under way: the largest score so far, the sum of weights, the weighted values."""

    largest: Array  # [..., 1]
    weight: Array  # [..., 1]
    values: Array  # [..., H]


class Steps(NamedTuple):
    """What depends on the window, the soft cap and the sinks."""

    score: Callable[[Array, Array, Array, Array], Array]
    first_chunk: Callable[[Array], Array]
    no_sums: Callable[[tuple[int, ...]], Softmax]


def attend(
    q: Array,  # [T, N, H]
    pages: Pages,  # [P, 2, K, page, H]
    batch: Batch,
    *,
    scale: float,
    window: Window | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """As `reference.attend`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = pages.shape[2]

    def score(queries: Array, keys: Array, query_positions: Array, key_positions: Array) -> Array:
        """[..., Q, H] x [..., C, H] -> [..., Q, C], masked."""
        scores = jnp.einsum("...qh,...ch->...qc", queries, keys, preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        query_positions, key_positions = query_positions[..., :, None], key_positions[..., None, :]
        seen = key_positions <= query_positions
        if window is not None:
            seen &= key_positions >= window.first(query_positions)
        return jnp.where(seen, scores, LOWEST)

    def first_chunk(position: Array) -> Array:
        """The first chunk that a query at `position` looks at."""
        return window.first(position) // CHUNK if window is not None else jnp.zeros_like(position)

    def no_sums(shape: tuple[int, ...]) -> Softmax:
        """Before the first chunk, for queries [..., K, G * Q, H]: a sink is a score that was seen already."""
        sums = _no_sums(shape)
        if sinks is None:
            return sums
        seen = jnp.maximum(sinks.astype(jnp.float32), LOWEST).reshape(num_kv_heads, -1, 1)
        seen = jnp.repeat(seen, shape[-2] // seen.shape[1], axis=1)
        return Softmax(jnp.broadcast_to(seen, sums.largest.shape), jnp.ones_like(sums.weight), sums.values)

    q = q.reshape(num_tokens, num_kv_heads, -1, head_dim)
    steps = Steps(score, first_chunk, no_sums)
    out, num_done = jnp.zeros_like(q), jnp.int32(0)
    if batch.num_decode is not None:
        out, num_done = _decode(q, pages, batch, batch.num_decode, steps), batch.num_decode
    if batch.cu_q is not None:
        out = _prefill(q, pages, batch, batch.cu_q, num_done, steps, out)
    return out.reshape(num_tokens, num_heads, head_dim)


def _decode(q: Array, pages: Pages, batch: Batch, num_decode: Array, steps: Steps) -> Array:
    """[T, K, G, H] with the rows of the first sequences, which have one token, filled in, and zeros elsewhere."""
    num_rows = min(q.shape[0], batch.kv_len.shape[0])  # a decode's token has the number of its sequence
    tile = min(DECODE_ROWS, num_rows)
    padding = -num_rows % tile
    queries = jnp.pad(q[:num_rows], ((0, padding), (0, 0), (0, 0), (0, 0)))
    kv_len = jnp.pad(batch.kv_len[:num_rows], (0, padding))
    table = jnp.pad(batch.page_table[:num_rows], ((0, padding), (0, 0)))

    def tile_body(i: Array, out: Array) -> Array:
        row = i * tile
        # In float32: for so few queries a head, XLA's CPU backend converts on the way anyway, and slower.
        tile_queries = lax.dynamic_slice_in_dim(queries, row, tile).astype(jnp.float32)  # R K G H
        tile_table = lax.dynamic_slice_in_dim(table, row, tile)
        lengths = jnp.where(row + jnp.arange(tile) < num_decode, lax.dynamic_slice_in_dim(kv_len, row, tile), 0)
        positions = (lengths - 1)[:, None, None]  # R K Q

        def chunk_body(chunk: Array, sums: Softmax) -> Softmax:
            keys, values = (x.astype(jnp.float32) for x in _gather(pages, tile_table, lengths, chunk))  # R K C H
            return _add(sums, steps.score(tile_queries, keys, positions, _chunk_positions(chunk)[None, None]), values)

        start = steps.first_chunk(jnp.min(jnp.where(lengths > 0, lengths - 1, jnp.iinfo(jnp.int32).max)))
        stop = -(-jnp.max(lengths) // CHUNK)
        sums = lax.fori_loop(start, stop, chunk_body, steps.no_sums(tile_queries.shape))
        return lax.dynamic_update_slice_in_dim(out, _ratio(sums).astype(out.dtype), row, 0)

    out = lax.fori_loop(0, -(-num_decode // tile), tile_body, jnp.zeros_like(queries))
    return jnp.pad(out[:num_rows], ((0, q.shape[0] - num_rows), (0, 0), (0, 0), (0, 0)))


def _prefill(
    q: Array,
    pages: Pages,
    batch: Batch,
    cu_q: Array,
    num_done: Array,
    steps: Steps,
    out: Array,
) -> Array:
    """`out` with the rows of the sequences after the first `num_done` filled in."""
    num_tokens, num_kv_heads, group, head_dim = q.shape
    tile = min(QUERY_TILE, num_tokens)
    # The last tile may reach past the last token.
    q, out = (jnp.pad(x, ((0, tile), (0, 0), (0, 0), (0, 0))) for x in (q, out))

    def sequence_body(sequence: Array, out: Array) -> Array:
        begin, end = cu_q[sequence], cu_q[sequence + 1]
        offset = batch.kv_len[sequence] - end  # from a token's place in the batch to its position
        table = lax.dynamic_slice_in_dim(batch.page_table, sequence, 1)
        length = batch.kv_len[sequence][None]

        def tile_body(i: Array, out: Array) -> Array:
            first = begin + i * tile
            last = jnp.minimum(first + tile, end) - 1
            queries = lax.dynamic_slice_in_dim(q, first, tile)  # Q K G H
            queries = jnp.moveaxis(queries, 0, 2).reshape(num_kv_heads, group * tile, head_dim)
            positions = jnp.tile(first + offset + jnp.arange(tile, dtype=jnp.int32), group)[None]

            def chunk_body(chunk: Array, sums: Softmax) -> Softmax:
                keys, values = (x[0].astype(q.dtype) for x in _gather(pages, table, length, chunk))  # K C H
                return _add(sums, steps.score(queries, keys, positions, _chunk_positions(chunk)[None]), values)

            start, stop = steps.first_chunk(first + offset), (last + offset) // CHUNK + 1
            sums = lax.fori_loop(start, stop, chunk_body, steps.no_sums(queries.shape))
            new = jnp.moveaxis(_ratio(sums).reshape(num_kv_heads, group, tile, head_dim), 2, 0).astype(out.dtype)
            old = lax.dynamic_slice_in_dim(out, first, tile)
            mine = first + jnp.arange(tile) <= last  # the tile's tail belongs to the next sequence
            return lax.dynamic_update_slice_in_dim(out, jnp.where(mine[:, None, None, None], new, old), first, 0)

        return lax.fori_loop(0, -(-(end - begin) // tile), tile_body, out)

    return lax.fori_loop(num_done, batch.num_seqs, sequence_body, out)[:num_tokens]


def _gather(pages: Pages, table: Array, lengths: Array, chunk: Array) -> tuple[Array, Array]:
    """The keys and values of one chunk of each row of `table` [R, B]: two of [R, K, CHUNK, H]."""
    _, _, num_kv_heads, page_size, head_dim = pages.shape
    rows, part = table.shape[0], min(page_size, CHUNK)
    parts_per_page, parts_per_chunk = page_size // part, CHUNK // part
    # A page of one head is cut into parts of at most a chunk, so that one gather brings them in the wanted order.
    parts = jax.tree.map(lambda each: each.reshape(-1, part, *each.shape[4:]), pages)
    wanted = chunk * parts_per_chunk + jnp.arange(parts_per_chunk, dtype=jnp.int32)
    page = table[:, jnp.minimum(wanted // parts_per_page, table.shape[1] - 1)]  # past the table: masked by position
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    key_part = (page[:, None, :] * (2 * num_kv_heads) + heads) * parts_per_page + (wanted % parts_per_page)[
        None, None, :
    ]
    value_part = key_part + num_kv_heads * parts_per_page

    def gathered(places: Array) -> Array:
        return value(jax.tree.map(lambda each: each[places], parts)).reshape(rows, num_kv_heads, CHUNK, head_dim)

    # A page may hold anything past its sequence's end, also NaN, which a weight of 0 would not take away.
    written = _chunk_positions(chunk)[None, :] < lengths[:, None]
    values = jnp.where(written[:, None, :, None], gathered(value_part), 0)
    return gathered(key_part), values


def _chunk_positions(chunk: Array) -> Array:
    return chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)


def _no_sums(shape: tuple[int, ...]) -> Softmax:
    return Softmax(
        jnp.full((*shape[:-1], 1), LOWEST, jnp.float32),
        jnp.zeros((*shape[:-1], 1), jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def _add(sums: Softmax, scores: Array, values: Array) -> Softmax:
    """`sums` with the keys of one chunk added."""
    largest = jnp.maximum(sums.largest, jnp.max(scores, axis=-1, keepdims=True))
    # A masked score weighs nothing, also where nothing but masked scores has been seen yet.
    weights = jnp.where(scores > LOWEST, jnp.exp(scores - largest), 0)
    decay = jnp.exp(sums.largest - largest)
    # The pages before a window may be others' by now and hold anything, also NaN, which a weight of 0 would not take
    # away. A score of NaN is the sequence's own, and shall show.
    values = jnp.where(jnp.any(scores != LOWEST, axis=-2)[..., None], values, 0)
    new = jnp.einsum("...qc,...ch->...qh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return Softmax(
        largest,
        sums.weight * decay + jnp.sum(weights, axis=-1, keepdims=True),
        sums.values * decay + new,
    )


def _ratio(sums: Softmax) -> Array:
    return sums.values / jnp.where(sums.weight > 0, sums.weight, 1)
