"""The warpgroups of decode attention on Hopper that multiply, with queries as the rows of products.

The rows of a group, in blocks of 8, fill a fraction of what a tensor core multiplies, but memory is what takes time.
Rows past that are kept at zero: reading at full speed, the GPU is at the limit of its power, and multiplying noise
would lower its clock.
"""

import functools

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.hopper import MMA_ROWS
from hex_llm.kernels.paged_attention.gpu_decode_chunks import Chunk, Refs, Turns, for_each_chunk
from hex_llm.kernels.paged_attention.gpu_decode_sizes import Q_SLOTS, Sizes
from hex_llm.kernels.paged_attention.gpu_decode_tile import (
    Softmax,
    add_product,
    clear_unseen,
    least_of_rows,
    per_row,
    product,
    spread,
    tile_scales,
    widen,
)
from hex_llm.kernels.paged_attention.gpu_scales import scaled


def attend_rows(refs: Refs, sizes: Sizes, softmax: Softmax, worker: Array) -> None:
    """Attends to the tiles of this worker's chunks as they come, and writes the chunks' results."""
    plgpu.griddepcontrol_wait()
    plgpu.set_max_registers(232, action="increase")

    def attend_chunk(chunk: Chunk, turns: Turns) -> None:
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
            key_scales, value_scales = tile_scales(refs, slot, 1, first, end)
            if sizes.widened:
                widen(refs, slot, worker)
                plgpu.barrier_arrive(refs.empty.at[slot])
                place = worker
            products = product(refs.q_smem.at[q_slot], refs.multiplied.at[place, 0], sizes.tile)
            scores = softmax.scores(scaled(products, key_scales, 1))
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
            if not sizes.scaled:
                pl.when(partly_seen)(functools.partial(clear_unseen, refs.multiplied.at[place, 1], first, end))
            weights = scaled(weights, value_scales, 1).astype(sizes.dtype)
            values = add_product(values, weights, refs.multiplied, place)
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
            group = refs.out_smem.at[worker, pl.ds(sizes.first_q_row(chunk.row), sizes.group)]
            target = refs.averages.at[chunk.row, chunk.number, :, columns]
            plgpu.copy_smem_to_gmem(group, target)

    def visit(chunk: Chunk, turns: Turns) -> Turns:
        if sizes.workers == 1:
            attend_chunk(chunk, turns)
        else:
            mine = lax.rem(turns.chunks, sizes.workers) == worker
            pl.when(mine)(functools.partial(attend_chunk, chunk, turns))
            pl.when(~mine)(functools.partial(_pass_chunk, refs, sizes, chunk, turns))
        return Turns(turns.tiles + chunk.num_tiles, turns.chunks + 1)

    for_each_chunk(refs, sizes, visit)
    plgpu.wait_smem_to_gmem(0)


def _pass_chunk(refs: Refs, sizes: Sizes, chunk: Chunk, turns: Turns) -> None:
    """Lets go by what is another worker's: a barrier only tells its latest phase, so none may be missed."""
    q_slot = lax.rem(turns.chunks, Q_SLOTS)
    plgpu.barrier_wait(refs.q_full.at[q_slot])
    plgpu.barrier_arrive(refs.q_empty.at[q_slot])

    def pass_tile(i: Array, _: None) -> None:
        slot = lax.rem(turns.tiles + i, sizes.slots)
        plgpu.barrier_wait(refs.full.at[slot])
        plgpu.barrier_arrive(refs.empty.at[slot])

    lax.fori_loop(0, chunk.num_tiles, pass_tile, None)
