"""What the warpgroups of decode attention on Hopper share: memory, and the order in which they go through chunks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.paged_attention.gpu_decode_sizes import Sizes


class Refs(NamedTuple):
    q: Any  # [blocks, 8, H]
    pages: Any  # [P * 2 * K * parts per page, part, H]
    scales: Any  # [P * 2 * K * parts per page, part]; None where pages have none
    table: Any  # [S, B]
    sequences: Any
    shares: Any
    averages: Any  # [rows, max_chunks, G, H]
    exponents: Any  # [rows, max_chunks, MMA_ROWS]
    q_smem: Any  # [Q_SLOTS, MMA_ROWS, H], with zeros past q_rows; turned: [Q_SLOTS, q_rows, H]
    out_smem: Any  # [workers, MMA_ROWS, out_columns]; turned: [workers, q_rows, H]
    weights_smem: Any  # turned: [workers, q_rows, tile]; otherwise None
    kv_smem: Any  # [slots, 2, tile, H]
    scales_smem: Any  # [slots, 2, tile], or None
    wide_smem: Any  # [workers, 2, tile, H]: a tile of 8-bit pages in 16 bits; None where they are read as they are
    full: Any
    empty: Any
    q_full: Any
    q_empty: Any

    @property
    def multiplied(self) -> Any:
        """Where wgmma finds keys and values."""
        return self.kv_smem if self.wide_smem is None else self.wide_smem


class Chunk(NamedTuple):
    row: Array
    sequence: Array
    head: Array
    number: Array  # among the row's chunks
    first_tile: Array
    num_tiles: Array
    length: Array  # of the sequence


class Turns(NamedTuple):
    """How many tiles and chunks a warpgroup has behind it: they say which slots are next."""

    tiles: Array
    chunks: Array


def for_each_chunk(refs: Refs, sizes: Sizes, visit: Callable[[Chunk, Turns], Turns]) -> None:
    """Visits the chunks of this CTA's share in order."""
    core = lax.axis_index("core")
    first_row, first_chunk, last_row, end_chunk = (refs.shares[core + i, j] for i in (0, 1) for j in (0, 1))

    def row_body(row: Array, turns: Turns) -> Turns:
        sequence, head = lax.div(row, sizes.num_kv_heads), lax.rem(row, sizes.num_kv_heads)
        length, first_tile, chunk_tiles, chunks = (refs.sequences[sequence, i] for i in range(4))
        end_tile = lax.div(length + (sizes.tile - 1), sizes.tile)

        def chunk_body(index: Array, turns: Turns) -> Turns:
            start = first_tile + index * chunk_tiles
            tiles = jnp.minimum(chunk_tiles, end_tile - start)
            return visit(Chunk(row, sequence, head, index, start, tiles, length), turns)

        begin = jnp.where(row == first_row, first_chunk, 0)
        end = jnp.where(row == last_row, end_chunk, chunks)
        return lax.fori_loop(begin, end, chunk_body, turns)

    lax.fori_loop(first_row, last_row + 1, row_body, Turns(jnp.int32(0), jnp.int32(0)))
