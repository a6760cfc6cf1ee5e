"""Decode attention for Hopper in Mosaic GPU: one query token a sequence against its pages, at the memory's speed.

A *row* is a sequence and one of its kv heads; its context is read in *tiles* of tokens. Each row is cut into *chunks*
of tiles, and the chunks of all rows, laid end to end, are dealt to persistent CTAs, one per SM, in shares of nearly
equal length. In a CTA one warpgroup streams pages into a ring in shared memory and never stops between chunks; others,
the *workers*, multiply on the tensor cores. Two workers take the chunks in turn, so that one finishes a chunk while the
other has begun the next. They write each chunk's own softmax average and log2-sum-exp; a second, small kernel merges a
row's chunks.

The rows of a group, in blocks of 8, fill a fraction of what a tensor core multiplies, but memory is what takes time.
Rows past that are kept at zero: reading at full speed, the GPU is at the limit of its power, and multiplying noise
would lower its clock.

The kernel begins while the one in front, which writes the last tokens' keys and values, still runs (see `chain`): until
that has ended it reads the plan, the page table and the tokens before.

How a row is cut follows from its own length and the shapes alone, and its chunks are merged in order. So a row's
result has the same bits whatever else is in the batch; which CTA computes a chunk changes nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.hopper import LOG2E, MMA_ROWS
from hex_llm.kernels.paged_attention.gpu_decode_merge import merge
from hex_llm.kernels.paged_attention.gpu_decode_plan import DEFAULT, DecodePlan, Tuning, plan_decode
from hex_llm.kernels.paged_attention.gpu_decode_sizes import Q_SLOTS, SWIZZLE_ROWS, Sizes, refusal, sizes_of
from hex_llm.kernels.paged_attention.gpu_decode_tile import (
    add_product,
    clear_unseen,
    least_of_rows,
    per_row,
    pieces,
    product,
    spread,
)
from hex_llm.kernels.window import Window

__all__ = ["DEFAULT", "DecodePlan", "Tuning", "decode", "plan_decode", "refusal"]


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "out_rows", "tuning"))
def decode(
    q: Array,  # [S, N, H]
    pages: Array,  # [P, 2, K, page, H]
    page_table: Array,  # [S, B] int32
    plan: DecodePlan,
    *,
    scale: float,
    window: Window | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,  # [N]
    out_rows: int | None = None,
    tuning: Tuning = DEFAULT,
) -> Array:
    """Attention [S, N, H] of each sequence's last token to its tokens in the window; 0 where it has none.

    With `out_rows`, rows of zeros follow up to that number. Jitted, so that the layers of a model share one lowering.
    """
    if (reason := refusal(q.shape, pages.shape, q.dtype, pages.dtype)) is not None:
        raise ValueError(f"decode attention: {reason}")
    sizes = sizes_of(q, pages, tuning)
    softmax = _Softmax(scale=scale, window=window, soft_cap=soft_cap)
    averages, exponents = _attend(q, pages, page_table, plan, sizes, softmax)
    rows = out_rows or q.shape[0]
    return merge(averages, exponents, plan, sizes, rows, sinks).reshape(rows, *q.shape[1:])


@dataclasses.dataclass(frozen=True)
class _Softmax:
    scale: float
    window: Window | None
    soft_cap: float | None

    def scores(self, products: Array) -> Array:
        """The exponents, to base 2, of the weights that products of queries and keys stand for."""
        if self.soft_cap is None:
            return products * (self.scale * LOG2E)
        # tanh by exp2: the hardware's own tanh is coarser than bfloat16 once it is multiplied by the cap.
        power = jnp.exp2(products * (2 * LOG2E * self.scale / self.soft_cap))
        return (self.soft_cap * LOG2E) - (2 * self.soft_cap * LOG2E) / (1 + power)


def _swizzled(head_dim: int, dtype: Any) -> tuple:
    """The layout in shared memory that TMA writes and wgmma reads, for rows of `head_dim`."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next(s for s in (128, 64, 32) if head_dim * itemsize % s == 0)
    tiling = plgpu.TilingTransform((SWIZZLE_ROWS, swizzle // itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


class _Refs(NamedTuple):
    q: Any  # [blocks, q_rows, H]
    pages: Any  # [P * 2 * K * parts per page, part, H]
    table: Any  # [S, B]
    sequences: Any
    shares: Any
    averages: Any  # [rows, max_chunks, G, H]
    exponents: Any  # [rows, max_chunks, MMA_ROWS]
    q_smem: Any  # [Q_SLOTS, MMA_ROWS, H]: zeros past q_rows
    out_smem: Any  # [workers, MMA_ROWS, out_columns]
    kv_smem: Any  # [slots, 2, tile, H]
    wide_smem: Any  # [workers, 2, tile, H]: a tile of 8-bit pages in 16 bits; None for pages of 16 bits
    full: Any
    empty: Any
    q_full: Any
    q_empty: Any

    @property
    def multiplied(self) -> Any:
        """Where wgmma finds keys and values."""
        return self.kv_smem if self.wide_smem is None else self.wide_smem


class _Chunk(NamedTuple):
    row: Array
    sequence: Array
    head: Array
    number: Array  # among the row's chunks
    first_tile: Array
    num_tiles: Array
    length: Array  # of the sequence


class _Turns(NamedTuple):
    """How many tiles and chunks a warpgroup has behind it: they say which slots are next."""

    tiles: Array
    chunks: Array


def _attend(
    q: Array, pages: Array, page_table: Array, plan: DecodePlan, sizes: Sizes, softmax: _Softmax
) -> tuple[Array, Array]:
    """Every chunk's average [rows, max_chunks, G, H] and log2-sum-exp [rows, max_chunks, MMA_ROWS]."""
    z = sizes
    if z.padded:
        q = q.reshape(z.rows, z.group, z.head_dim)
        q = jnp.pad(q, ((0, 0), (0, z.q_rows - z.group), (0, 0)))
    copies = 2 * (z.tile // z.part)
    ring = plgpu.SMEM((z.slots, 2, z.tile, z.head_dim), z.pages_dtype, transforms=_swizzled(z.head_dim, z.pages_dtype))
    wide = plgpu.SMEM((z.workers, 2, z.tile, z.head_dim), z.dtype, transforms=_swizzled(z.head_dim, z.dtype))

    def body(*refs: Any) -> None:
        # The kernel behind may come now: it waits for the end of this one before it reads what this one writes.
        plgpu.griddepcontrol_launch_dependents()
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(functools.partial(_memory_side, _Refs(*refs), z))
        pl.when(warpgroup > 0)(functools.partial(_compute_side, _Refs(*refs), z, softmax, warpgroup - 1))

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((z.rows, z.max_chunks, z.group, z.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((z.rows, z.max_chunks, MMA_ROWS), jnp.float32),
        ],
        grid=(plan.shares.shape[0] - 1,),
        grid_names=("core",),
        num_threads=1 + z.workers,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((Q_SLOTS, MMA_ROWS, z.head_dim), z.dtype, transforms=_swizzled(z.head_dim, z.dtype)),
            plgpu.SMEM((z.workers, MMA_ROWS, z.out_columns), jnp.float32),
            ring,
            wide if z.widened else None,
            plgpu.Barrier(num_arrivals=copies, num_barriers=z.slots),
            plgpu.Barrier(num_arrivals=z.workers, num_barriers=z.slots),
            plgpu.Barrier(num_barriers=Q_SLOTS),
            plgpu.Barrier(num_arrivals=z.workers, num_barriers=Q_SLOTS),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(
        q.reshape(-1, z.q_rows, z.head_dim).astype(z.dtype),
        pages.reshape(-1, z.part, z.head_dim),
        page_table,
        plan.sequences,
        plan.shares,
    )


def _for_each_chunk(refs: _Refs, sizes: Sizes, visit: Callable[[_Chunk, _Turns], _Turns]) -> None:
    """Visits the chunks of this CTA's share in order."""
    core = lax.axis_index("core")
    first_row, first_chunk, last_row, end_chunk = (refs.shares[core + i, j] for i in (0, 1) for j in (0, 1))

    def row_body(row: Array, turns: _Turns) -> _Turns:
        sequence, head = lax.div(row, sizes.num_kv_heads), lax.rem(row, sizes.num_kv_heads)
        length, first_tile, chunk_tiles, chunks = (refs.sequences[sequence, i] for i in range(4))
        end_tile = lax.div(length + (sizes.tile - 1), sizes.tile)

        def chunk_body(index: Array, turns: _Turns) -> _Turns:
            start = first_tile + index * chunk_tiles
            tiles = jnp.minimum(chunk_tiles, end_tile - start)
            return visit(_Chunk(row, sequence, head, index, start, tiles, length), turns)

        begin = jnp.where(row == first_row, first_chunk, 0)
        end = jnp.where(row == last_row, end_chunk, chunks)
        return lax.fori_loop(begin, end, chunk_body, turns)

    lax.fori_loop(first_row, last_row + 1, row_body, _Turns(jnp.int32(0), jnp.int32(0)))


def _memory_side(refs: _Refs, sizes: Sizes) -> None:
    """Keeps the ring of tiles, and the next chunk's queries, filled."""
    zeros = plgpu.layout_cast(jnp.zeros((MMA_ROWS, sizes.head_dim), sizes.dtype), plgpu.Layout.WGMMA)
    for slot in range(Q_SLOTS):
        refs.q_smem[slot] = zeros  # stays in the rows past q_rows
    plgpu.commit_smem()
    plgpu.set_max_registers(40, action="decrease")
    parts_per_tile = sizes.tile // sizes.part
    parts_per_page = sizes.page_size // sizes.part

    def load_chunk(chunk: _Chunk, turns: _Turns) -> _Turns:
        last_page = lax.div(chunk.length - 1, sizes.page_size)

        def load_tile(i: Array, turn: Array) -> Array:
            slot = lax.rem(turn, sizes.slots)
            first = (chunk.first_tile + i) * parts_per_tile
            sources = []
            for part in range(parts_per_tile):
                # Past the end, the last page again, which is a page of ours and in the cache. The ids are read before
                # the slot is free, because it takes time.
                page_index, place = _divmod(first + part, parts_per_page)
                page = refs.table[chunk.sequence, jnp.minimum(page_index, last_page)]
                sources.append((page, place))
            pl.when(turn >= sizes.slots)(lambda: plgpu.barrier_wait(refs.empty.at[slot]))
            for part, (page, place) in enumerate(sources):
                for kind in range(2):
                    block = ((2 * page + kind) * sizes.num_kv_heads + chunk.head) * parts_per_page + place
                    target = refs.kv_smem.at[slot, kind, pl.ds(part * sizes.part, sizes.part)]
                    plgpu.copy_gmem_to_smem(refs.pages.at[block], target, refs.full.at[slot])
            return turn + 1

        # The first tiles to be read need not wait for the kernel in front, but for the one with the last token.
        old = jnp.minimum(lax.div(chunk.length - 1, sizes.tile) - chunk.first_tile, chunk.num_tiles)
        early = jnp.where(turns.chunks == 0, jnp.minimum(old, sizes.slots), 0)
        turn = lax.fori_loop(0, early, load_tile, turns.tiles)
        pl.when(turns.chunks == 0)(plgpu.griddepcontrol_wait)
        q_slot = lax.rem(turns.chunks, Q_SLOTS)
        pl.when(turns.chunks >= Q_SLOTS)(lambda: plgpu.barrier_wait(refs.q_empty.at[q_slot]))
        block = chunk.row if sizes.padded else lax.div(chunk.row * sizes.group, sizes.q_rows)
        q_rows = refs.q_smem.at[q_slot, pl.ds(0, sizes.q_rows)]
        plgpu.copy_gmem_to_smem(refs.q.at[block], q_rows, refs.q_full.at[q_slot])
        return _Turns(lax.fori_loop(early, chunk.num_tiles, load_tile, turn), turns.chunks + 1)

    _for_each_chunk(refs, sizes, load_chunk)


def _compute_side(refs: _Refs, sizes: Sizes, softmax: _Softmax, worker: Array) -> None:
    """Attends to the tiles of this worker's chunks as they come, and writes the chunks' results."""
    plgpu.griddepcontrol_wait()
    plgpu.set_max_registers(232, action="increase")

    def attend_chunk(chunk: _Chunk, turns: _Turns) -> None:
        q_slot = lax.rem(turns.chunks, Q_SLOTS)
        plgpu.barrier_wait(refs.q_full.at[q_slot])
        begin = jnp.int32(0) if softmax.window is None else softmax.window.first(chunk.length - 1)

        def attend_tile(i: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            values, largest, weight, turn = carry
            slot = lax.rem(turn, sizes.slots)
            start = (chunk.first_tile + i) * sizes.tile
            first, end = begin - start, chunk.length - start  # what is seen, as positions in the tile
            plgpu.barrier_wait(refs.full.at[slot])
            place = slot
            if sizes.widened:
                _widen(refs, slot, worker)
                plgpu.barrier_arrive(refs.empty.at[slot])
                place = worker
            scores = softmax.scores(product(refs.q_smem.at[q_slot], refs.multiplied.at[place, 0], sizes.tile))
            position = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            seen = position < end
            if softmax.window is not None:
                seen &= position >= first
            scores = jnp.where(seen, scores, -jnp.inf)
            new_largest = jnp.maximum(largest, scores.max(axis=1))
            decay = jnp.exp2(largest - new_largest)
            weights = jnp.exp2(scores - spread(new_largest, scores.shape))
            weight = weight * decay + weights.sum(axis=1)
            values = values * spread(decay, values.shape)
            partly_seen = end < sizes.tile if softmax.window is None else (end < sizes.tile) | (first > 0)
            pl.when(partly_seen)(functools.partial(clear_unseen, refs.multiplied.at[place, 1], first, end))
            values = add_product(values, weights.astype(sizes.dtype), refs.multiplied, place)
            if not sizes.widened:
                plgpu.barrier_arrive(refs.empty.at[slot])
            return values, new_largest, weight, turn + 1

        zeros = jnp.zeros((MMA_ROWS, sizes.head_dim), jnp.float32)
        start = (plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), least_of_rows(sizes.q_rows), per_row(0.0), turns.tiles)
        values, largest, weight, _ = lax.fori_loop(0, chunk.num_tiles, attend_tile, start)
        plgpu.barrier_arrive(refs.q_empty.at[q_slot])
        refs.exponents[chunk.row, chunk.number] = largest + jnp.log2(weight)
        average = values * spread(1.0 / weight, values.shape)
        for column in range(0, sizes.head_dim, sizes.out_columns):
            columns = pl.ds(column, sizes.out_columns)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before
            refs.out_smem[worker] = average[:, column : column + sizes.out_columns]
            plgpu.commit_smem()
            group = refs.out_smem.at[worker, pl.ds(sizes.first_q_row(chunk.head), sizes.group)]
            target = refs.averages.at[chunk.row, chunk.number, :, columns]
            plgpu.copy_smem_to_gmem(group, target)

    def visit(chunk: _Chunk, turns: _Turns) -> _Turns:
        if sizes.workers == 1:
            attend_chunk(chunk, turns)
        else:
            mine = lax.rem(turns.chunks, sizes.workers) == worker
            pl.when(mine)(functools.partial(attend_chunk, chunk, turns))
            pl.when(~mine)(functools.partial(_pass_chunk, refs, sizes, chunk, turns))
        return _Turns(turns.tiles + chunk.num_tiles, turns.chunks + 1)

    _for_each_chunk(refs, sizes, visit)
    plgpu.wait_smem_to_gmem(0)


def _pass_chunk(refs: _Refs, sizes: Sizes, chunk: _Chunk, turns: _Turns) -> None:
    """Lets go by what is another worker's: a barrier only tells its latest phase, so none may be missed."""
    q_slot = lax.rem(turns.chunks, Q_SLOTS)
    plgpu.barrier_wait(refs.q_full.at[q_slot])
    plgpu.barrier_arrive(refs.q_empty.at[q_slot])

    def pass_tile(i: Array, _: None) -> None:
        slot = lax.rem(turns.tiles + i, sizes.slots)
        plgpu.barrier_wait(refs.full.at[slot])
        plgpu.barrier_arrive(refs.empty.at[slot])

    lax.fori_loop(0, chunk.num_tiles, pass_tile, None)


def _widen(refs: _Refs, slot: Array, worker: Array) -> None:
    """Copies a tile of 8-bit keys and values to where a worker's wgmma reads them, in 16 bits."""
    plgpu.commit_smem()  # every warp has read the last tile
    for kind in range(2):
        for columns in pieces(refs.kv_smem.shape[-1], 128):
            narrow = plgpu.load(refs.kv_smem.at[slot, kind, :, columns], layout=plgpu.Layout.WGMMA_8BIT)
            refs.wide_smem[worker, kind, :, columns] = narrow.astype(refs.wide_smem.dtype)
    plgpu.commit_smem()


def _divmod(x: Array, divisor: int) -> tuple[Array, Array | int]:
    return (x, 0) if divisor == 1 else (lax.div(x, divisor), lax.rem(x, divisor))
