"""Keys and values on their way to a TPU's vector memory: those of a list of items, block after block.

An item is a sequence, or a part of it whose queries are looked at together; it sees the keys from its first one up to
its limit. Blocks begin at multiples of their size in the sequence, so what is added up together does not depend on who
else is in the batch. Up to all but one block of the ring are on their way while that one is in use. The page table is
too large for scalar memory; an item's row of it is fetched while the item before it is under way.
"""

from collections.abc import Callable
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
    rows: Any  # [2 * B] int32: of this item and the next
    ring: Any  # [ring, 2, K', block, H]
    cursor: Any  # [4] int32
    row_arrived: Any  # [2] semaphores
    arrived: Any  # [ring] semaphores


def scratch(sizes: Sizes, dtype: Any) -> list:
    """The last five of `Blocks`."""
    return [
        pltpu.SMEM((2 * sizes.table_width,), jnp.int32),
        pltpu.VMEM((sizes.ring, 2, sizes.num_kv_heads, sizes.block, sizes.head_dim), dtype),
        pltpu.SMEM((4,), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((sizes.ring,)),
    ]


def first_block(blocks: Blocks, sizes: Sizes, item: Array) -> Array:
    return quotient(blocks.items[FIRST, item], sizes.block)


def end_block(blocks: Blocks, sizes: Sizes, item: Array) -> Array:
    return quotient(blocks.items[LIMIT, item] + (sizes.block - 1), sizes.block)


def begin(blocks: Blocks, sizes: Sizes, first_head: Array | int) -> None:
    """Sends for the first blocks of all."""
    blocks.cursor[NEXT_ITEM] = 0
    blocks.cursor[NEXT_BLOCK] = first_block(blocks, sizes, jnp.int32(0))
    blocks.cursor[SENT] = 0
    blocks.cursor[TAKEN] = 0

    @pl.when(blocks.num_items[0] > 0)
    def _():
        _for_each_piece(blocks, sizes, jnp.int32(0), lambda copy: copy.start())

    lax.fori_loop(0, sizes.ring - 1, lambda *_: _send(blocks, sizes, first_head), None)


def take(blocks: Blocks, sizes: Sizes, item: Array, block: Array, first_head: Array | int) -> Array:
    """Where in the ring the next block is, which must be this one of this item, once it is there."""
    _send(blocks, sizes, first_head)
    slot = remainder(blocks.cursor[TAKEN], sizes.ring)
    blocks.cursor[TAKEN] += 1
    start, stop = _parts(blocks, sizes, item, block)

    @pl.when(stop - start == sizes.parts)
    def _():
        there = blocks.ring.at[slot]
        pltpu.make_async_copy(there, there, blocks.arrived.at[slot]).wait()

    @pl.when(stop - start < sizes.parts)
    def _():
        there = blocks.ring.at[slot, :, :, pl.ds(0, sizes.part)]
        one = pltpu.make_async_copy(there, there, blocks.arrived.at[slot])
        lax.fori_loop(start, stop, lambda *_: one.wait(), None)

    _clear_values(blocks, sizes, item, block, slot)
    return slot


def _send(blocks: Blocks, sizes: Sizes, first_head: Array | int) -> None:
    """Sends for the block that the cursor is at, and moves it on."""
    item = blocks.cursor[NEXT_ITEM]

    @pl.when(item < blocks.num_items[0])
    def _():
        block, slot = blocks.cursor[NEXT_BLOCK], remainder(blocks.cursor[SENT], sizes.ring)

        @pl.when(block == first_block(blocks, sizes, item))
        def _():
            _for_each_piece(blocks, sizes, item, lambda copy: copy.wait())

            # The item before has sent for all of its blocks: its row is needed no more.
            @pl.when(item + 1 < blocks.num_items[0])
            def _():
                _for_each_piece(blocks, sizes, item + 1, lambda copy: copy.start())

        _send_parts(blocks, sizes, item, block, slot, first_head)
        blocks.cursor[SENT] += 1
        last = block + 1 == end_block(blocks, sizes, item)
        following = jnp.minimum(item + 1, blocks.num_items[0] - 1)
        blocks.cursor[NEXT_ITEM] = jnp.where(last, item + 1, item)
        blocks.cursor[NEXT_BLOCK] = jnp.where(last, first_block(blocks, sizes, following), block + 1)


def _send_parts(blocks: Blocks, sizes: Sizes, item: Array, block: Array, slot: Array, first_head: Array | int) -> None:
    row = remainder(item, 2) * sizes.table_width
    start, stop = _parts(blocks, sizes, item, block)

    def send(part: Array | int) -> None:
        if sizes.page_size <= sizes.block:
            page, offset = blocks.rows[row + block * sizes.parts + part], 0
        else:
            position = block * sizes.block
            page = blocks.rows[row + quotient(position, sizes.page_size)]
            offset = pl.multiple_of(remainder(position, sizes.page_size), sizes.part)
        there = part * sizes.part
        there = there if isinstance(there, int) else pl.multiple_of(there, sizes.part)
        pltpu.make_async_copy(
            blocks.pages.at[page, :, pl.ds(first_head, sizes.num_kv_heads), pl.ds(offset, sizes.part)],
            blocks.ring.at[slot, :, :, pl.ds(there, sizes.part)],
            blocks.arrived.at[slot],
        ).start()

    # Written out, a copy is a handful of instructions; in a loop it is many more.
    @pl.when(stop - start == sizes.parts)
    def _():
        for part in range(sizes.parts):
            send(part)

    @pl.when(stop - start < sizes.parts)
    def _():
        lax.fori_loop(start, stop, lambda part, _: send(part), None)


def _parts(blocks: Blocks, sizes: Sizes, item: Array, block: Array) -> tuple[Array, Array]:
    """The parts of a block that hold keys that the item sees: from, up to."""
    base = block * sizes.block
    start = quotient(jnp.maximum(blocks.items[FIRST, item] - base, 0), sizes.part)
    stop = quotient(jnp.minimum(blocks.items[LIMIT, item] - base, sizes.block) + (sizes.part - 1), sizes.part)
    return start, stop


def _for_each_piece(blocks: Blocks, sizes: Sizes, item: Array, function: Callable[[Any], None]) -> None:
    """Of the item's row of the page table, of which only what it needs is copied."""
    tokens = sizes.table_piece * sizes.page_size
    start = quotient(blocks.items[FIRST, item], tokens)
    stop = quotient(blocks.items[LIMIT, item] + (tokens - 1), tokens)
    row, slot = blocks.items[ROW, item], remainder(item, 2)

    def one(piece: Array, _: None) -> None:
        first = pl.multiple_of(piece * sizes.table_piece, sizes.table_piece)
        there = pl.multiple_of(slot * sizes.table_width + first, sizes.table_piece)
        function(
            pltpu.make_async_copy(
                blocks.table.at[row, 0, pl.ds(first, sizes.table_piece)],
                blocks.rows.at[pl.ds(there, sizes.table_piece)],
                blocks.row_arrived.at[slot],
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


def quotient(number: Array, by: int) -> Array:
    """Of a number that is not negative: what is known to be so takes fewer instructions."""
    if by & (by - 1):
        return lax.div(number, by)
    return lax.shift_right_logical(number, by.bit_length() - 1)


def remainder(number: Array, by: int) -> Array:
    """Of a number that is not negative."""
    return lax.rem(number, by) if by & (by - 1) else number & (by - 1)


def precision(dtype: Any) -> jax.lax.Precision:
    """Of products: float32 would be rounded to bfloat16 before it is multiplied."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
