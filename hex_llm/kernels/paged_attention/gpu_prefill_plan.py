"""The work of prefill attention on Hopper, laid out once per step and shared by all layers."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.hopper import num_sms
from hex_llm.kernels.window import Window
from hex_llm.pytree import pytree

ROWS = 128  # query rows of a tile: tokens times the query heads of a kv head
KV_TILE = {64: 128, 96: 128, 128: 128, 256: 64}  # by head_dim: scores and sums have to stay in registers
MAX_CHUNKS = 32
MIN_CHUNK_TILES = 4  # a chunk of the context is worth a block from here on


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How a batch of one shape is cut."""

    blocks: int  # that run at once, one on each SM
    tokens: int  # of a cell
    kv_tile: int  # keys of a tile
    chunks: int  # of the context, at most


@pytree
class PrefillPlan:
    """Items are sorted, the longest first. An item is done once for each kv head."""

    items: Array  # [I, 12], columns in the order of ITEM
    num_items: Array  # [1]
    token_chunks: Array  # [T]: parts that a token's result is made of; 0 where it has none
    token_tile: Array  # [T]


# first_token and position are those of the cell, which may begin in another sequence; begin and end are the sequence's
# tokens in it. Tiles of keys go from `low` to `high`; those from `edge` to `diagonal` are seen whole by every token.
ITEM = (
    "sequence",
    "first_token",
    "position",
    "begin",
    "end",
    "low",
    "edge",
    "diagonal",
    "high",
    "kv_len",
    "chunk",
    "part",
)


def geometry(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Geometry:
    sms = num_sms()
    tokens = ROWS // (num_heads // num_kv_heads) // 8 * 8  # a swizzled copy begins at a multiple of 8
    # Splitting the context pays while the cells alone do not fill the chip.
    chunks = sms // (-(-num_tokens // tokens) * num_kv_heads)
    return Geometry(
        blocks=sms,
        tokens=tokens,
        kv_tile=KV_TILE[head_dim],
        chunks=min(max(chunks, 1), MAX_CHUNKS),
    )


def plan_prefill(
    cu_q: Array,  # [S+1] int32
    kv_len: Array,  # [S] int32
    first: Array | int,
    num_seqs: Array | int,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: Window | None = None,
) -> PrefillPlan:
    """The work for sequences first..num_seqs-1, which own the tokens cu_q[s]:cu_q[s+1], the last of kv_len[s]."""
    shape = geometry(num_tokens, num_heads, num_kv_heads, head_dim)
    cell, kv_tile, num_slots = shape.tokens, shape.kv_tile, kv_len.shape[0]
    max_tiles = min(-(-num_tokens // cell) + num_slots, num_tokens)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    starts, ends = cu_q[:-1], cu_q[1:]
    live = (slots >= first) & (slots < num_seqs) & (ends > starts)
    cells = jnp.where(live, (ends - 1) // cell - starts // cell + 1, 0)
    tile_ends = jnp.cumsum(cells)
    chunk_size = _chunk_size(-(-kv_len // kv_tile), shape, window)

    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(tile_ends, tile, side="right", method="compare_all"), num_slots - 1)
    first_token = (starts[sequence] // cell + tile - (tile_ends - cells)[sequence]) * cell
    begin = jnp.maximum(starts[sequence] - first_token, 0)
    end = jnp.minimum(ends[sequence] - first_token, cell)
    position = kv_len[sequence] - ends[sequence] + first_token
    first_position, last_position = position + begin, position + end - 1
    high = last_position // kv_tile + 1
    diagonal = (first_position + 1) // kv_tile
    if window is None:
        low = edge = jnp.zeros_like(high)
    else:
        low = window.first(first_position) // kv_tile
        edge = -(-window.first(last_position) // kv_tile)

    size = chunk_size[sequence]
    first_chunk = low // size
    num_chunks = jnp.where(tile < tile_ends[-1], (high - 1) // size - first_chunk + 1, 0)
    chunk = jnp.arange(shape.chunks, dtype=jnp.int32)[None, :]
    chunk_low = jnp.maximum(low[:, None], (first_chunk[:, None] + chunk) * size[:, None])
    chunk_high = jnp.minimum(high[:, None], (first_chunk[:, None] + chunk + 1) * size[:, None])
    fields = {
        "sequence": sequence[:, None],
        "first_token": first_token[:, None],
        "position": position[:, None],
        "begin": begin[:, None],
        "end": end[:, None],
        "low": chunk_low,
        "edge": jnp.clip(edge[:, None], chunk_low, chunk_high),
        "diagonal": jnp.clip(jnp.maximum(diagonal, edge)[:, None], chunk_low, chunk_high),
        "high": chunk_high,
        "kv_len": kv_len[sequence][:, None],
        "chunk": chunk,
        "part": tile[:, None] * shape.chunks + chunk,
    }
    work = jnp.where(chunk < num_chunks[:, None], chunk_high - chunk_low, 0).reshape(-1)
    items = jnp.stack([jnp.broadcast_to(fields[name], chunk_low.shape).reshape(-1) for name in ITEM], axis=1)
    order = jnp.argsort(-work, stable=True)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(ends, token, side="right", method="compare_all"), num_slots - 1)
    token_tile = (tile_ends - cells)[owner] + token // cell - starts[owner] // cell
    mine = live[owner] & (token >= starts[owner]) & (token < ends[owner])
    token_tile = jnp.where(mine, token_tile, 0)
    return PrefillPlan(
        items=items[order].astype(jnp.int32),
        num_items=jnp.sum(work > 0, dtype=jnp.int32)[None],
        token_chunks=jnp.where(mine, num_chunks[token_tile], 0).astype(jnp.int32),
        token_tile=token_tile.astype(jnp.int32),
    )


def _chunk_size(context: Array, shape: Geometry, window: Window | None) -> Array:
    """[S]: tiles of keys per chunk, from a sequence's own length `context` in tiles and the shapes alone."""
    if window is None:
        chunks = jnp.clip(context // MIN_CHUNK_TILES, 1, shape.chunks)
        return jnp.maximum(-(-context // chunks), 1)
    if shape.chunks == 1:
        return jnp.maximum(context, 1)
    # What the tokens of a cell see may begin anywhere in a chunk, so it touches one chunk more.
    seen = jnp.minimum((window.size + shape.tokens - 2) // shape.kv_tile + 2, context)
    return jnp.maximum(-(-seen // (shape.chunks - 1)), MIN_CHUNK_TILES)
