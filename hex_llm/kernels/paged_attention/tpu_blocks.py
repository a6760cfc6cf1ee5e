"""Keys and values on their way to a TPU's vector memory: those of a list of items, block after block.

An item is a sequence, or a part of it whose queries are looked at together; it sees the keys from its first one up to
its limit. Blocks begin at multiples of their size in the sequence, so what is added up together does not depend on who
else is in the batch. Up to all but one block of the ring are on their way while that one is in use. The page table is
too large for scalar memory; an item's row of it is fetched while the item before it is under way.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.paged_attention.tpu_sizes import Sizes

ROW, FIRST, LIMIT = range(3)  # of an item: its row of the page table, its first key, and the one after its last
NEXT_ITEM, NEXT_BLOCK, SENT, TAKEN = range(4)  # of the cursor; the last two are counts of blocks


class Blocks(NamedTuple):
    items: Any  # [fields, I] int32
    num_items: Any  # [1] int32
    table: Any  # [S, 1, B] int32, in HBM
    pages: Any  # [P, 2, K, page, H], in HBM
    rows: Any  # [2, B] int32: of this item and the next
    ring: Any  # [ring, 2, K', block, H]
    cursor: Any  # [4] int32
    row_arrived: Any  # [2] semaphores
    arrived: Any  # [ring] semaphores


def scratch(sizes: Sizes, dtype: Any) -> list:
    """The last five of `Blocks`."""
    return [
        pltpu.SMEM((2, sizes.table_width), jnp.int32),
        pltpu.VMEM((sizes.ring, 2, sizes.num_kv_heads, sizes.block, sizes.head_dim), dtype),
        pltpu.SMEM((4,), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((sizes.ring,)),
    ]


def first_block(blocks: Blocks, sizes: Sizes, item: Array) -> Array:
    return lax.div(blocks.items[FIRST, item], sizes.block)


def end_block(blocks: Blocks, sizes: Sizes, item: Array) -> Array:
    return lax.div(blocks.items[LIMIT, item] + (sizes.block - 1), sizes.block)


def begin(blocks: Blocks, sizes: Sizes, first_head: Array | int) -> None:
    """Sends for the first blocks of all."""
    blocks.cursor[NEXT_ITEM] = 0
    blocks.cursor[NEXT_BLOCK] = first_block(blocks, sizes, jnp.int32(0))
    blocks.cursor[SENT] = 0
    blocks.cursor[TAKEN] = 0

    @pl.when(blocks.num_items[0] > 0)
    def _():
        _send_row(blocks, sizes, jnp.int32(0))

    for _slot in range(sizes.ring - 1):
        _send(blocks, sizes, first_head)


def take(blocks: Blocks, sizes: Sizes, item: Array, block: Array, first_head: Array | int) -> Array:
    """Where in the ring the next block is, which must be this one of this item, once it is there."""
    _send(blocks, sizes, first_head)
    slot = lax.rem(blocks.cursor[TAKEN], sizes.ring)
    blocks.cursor[TAKEN] += 1
    start, stop = _parts(blocks, sizes, item, block)

    def wait(part: Array, _: None) -> None:
        _copy(blocks, sizes, jnp.int32(0), jnp.int32(0), part, slot, first_head).wait()

    lax.fori_loop(start, stop, wait, None)
    _clear_values(blocks, sizes, item, block, slot)
    return slot


def _send(blocks: Blocks, sizes: Sizes, first_head: Array | int) -> None:
    """Sends for the block that the cursor is at, and moves it on."""
    item = blocks.cursor[NEXT_ITEM]

    @pl.when(item < blocks.num_items[0])
    def _():
        block, slot = blocks.cursor[NEXT_BLOCK], lax.rem(blocks.cursor[SENT], sizes.ring)

        @pl.when(block == first_block(blocks, sizes, item))
        def _():
            _for_each_piece(blocks, sizes, item, lambda copy: copy.wait())

            # The item before has sent for all of its blocks: its row is needed no more.
            @pl.when(item + 1 < blocks.num_items[0])
            def _():
                _send_row(blocks, sizes, item + 1)

        start, stop = _parts(blocks, sizes, item, block)
        base = block * sizes.block

        def send(part: Array, _: None) -> None:
            position = base + part * sizes.part
            page = blocks.rows[lax.rem(item, 2), lax.div(position, sizes.page_size)]
            _copy(blocks, sizes, page, lax.rem(position, sizes.page_size), part, slot, first_head).start()

        lax.fori_loop(start, stop, send, None)
        blocks.cursor[SENT] += 1
        last = block + 1 == end_block(blocks, sizes, item)
        following = jnp.minimum(item + 1, blocks.num_items[0] - 1)
        blocks.cursor[NEXT_ITEM] = jnp.where(last, item + 1, item)
        blocks.cursor[NEXT_BLOCK] = jnp.where(last, first_block(blocks, sizes, following), block + 1)


def _parts(blocks: Blocks, sizes: Sizes, item: Array, block: Array) -> tuple[Array, Array]:
    """The parts of a block that hold keys that the item sees: from, up to."""
    base = block * sizes.block
    start = lax.div(jnp.maximum(blocks.items[FIRST, item] - base, 0), sizes.part)
    stop = lax.div(jnp.minimum(blocks.items[LIMIT, item] - base, sizes.block) + (sizes.part - 1), sizes.part)
    return start, stop


def _copy(
    blocks: Blocks, sizes: Sizes, page: Array, offset: Array, part: Array, slot: Array, first_head: Array | int
) -> Any:
    heads = pl.ds(first_head, sizes.num_kv_heads)
    rows = pl.ds(pl.multiple_of(offset, sizes.part), sizes.part)
    there = pl.ds(pl.multiple_of(part * sizes.part, sizes.part), sizes.part)
    return pltpu.make_async_copy(
        blocks.pages.at[page, :, heads, rows], blocks.ring.at[slot, :, :, there], blocks.arrived.at[slot]
    )


def _send_row(blocks: Blocks, sizes: Sizes, item: Array) -> None:
    _for_each_piece(blocks, sizes, item, lambda copy: copy.start())


def _for_each_piece(blocks: Blocks, sizes: Sizes, item: Array, function: Any) -> None:
    """Of the item's row of the page table, of which only what it needs is copied."""
    tokens = sizes.table_piece * sizes.page_size
    start, stop = lax.div(blocks.items[FIRST, item], tokens), lax.div(blocks.items[LIMIT, item] + (tokens - 1), tokens)
    row, slot = blocks.items[ROW, item], lax.rem(item, 2)

    def one(piece: Array, _: None) -> None:
        entries = pl.ds(pl.multiple_of(piece * sizes.table_piece, sizes.table_piece), sizes.table_piece)
        function(
            pltpu.make_async_copy(
                blocks.table.at[row, :, entries], blocks.rows.at[pl.ds(slot, 1), entries], blocks.row_arrived.at[slot]
            )
        )

    lax.fori_loop(start, stop, one, None)


def _clear_values(blocks: Blocks, sizes: Sizes, item: Array, block: Array, slot: Array) -> None:
    """Values that the item does not see may be anything, also NaN, which a weight of 0 would not take away."""
    first, limit, base = blocks.items[FIRST, item], blocks.items[LIMIT, item], block * sizes.block

    @pl.when((first > base) | (limit < base + sizes.block))
    def _():
        position = base + lax.broadcasted_iota(jnp.int32, (sizes.block, sizes.head_dim), 0)
        seen = (position >= first) & (position < limit)
        for head in range(sizes.num_kv_heads):
            values = blocks.ring[slot, 1, head].astype(jnp.float32)
            blocks.ring[slot, 1, head] = jnp.where(seen, values, 0).astype(blocks.ring.dtype)


def precision(dtype: Any) -> jax.lax.Precision:
    """Of products: float32 would be rounded to bfloat16 before it is multiplied."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
