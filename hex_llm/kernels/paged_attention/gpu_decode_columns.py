"""The warpgroup of decode attention on Hopper that multiplies, with queries as the columns of products.

Keys, and then the values of a head, are the rows that a tensor core multiplies all of, and the few queries of a group
its columns. So there is little to multiply and to weigh, sums and weights take few registers, and queries and results
little shared memory, which leaves it to keys and values under way. The largest score of a query is then one over all
warps, and weights go through shared memory; one warpgroup keeps up with the memory even so.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.paged_attention import gpu_decode_narrow
from hex_llm.kernels.paged_attention.gpu_decode_chunks import Chunk, Refs, Turns, for_each_chunk
from hex_llm.kernels.paged_attention.gpu_decode_sizes import Q_SLOTS, Sizes
from hex_llm.kernels.paged_attention.gpu_decode_tile import Softmax, clear_unseen, tile_scales
from hex_llm.kernels.paged_attention.gpu_scales import scaled

TURN = (1, 0)

type Carry = tuple[Array, Array, Array, Array]  # sums of values [H, Q], largest scores [Q], weights [tile, Q], turn


def attend_columns(refs: Refs, sizes: Sizes, softmax: Softmax, worker: Array) -> None:
    """Attends to the tiles of the chunks as they come, and writes the chunks' results."""
    plgpu.griddepcontrol_wait()
    plgpu.set_max_registers(232, action="increase")
    queries = sizes.q_rows

    def visit(chunk: Chunk, turns: Turns) -> Turns:
        q_slot = lax.rem(turns.chunks, Q_SLOTS)
        plgpu.barrier_wait(refs.q_full.at[q_slot])
        begin = jnp.int32(0) if softmax.window is None else softmax.window.first(chunk.length - 1)

        def attend_tile(i: Array, carry: Carry) -> Carry:
            values, largest, weight, turn = carry
            slot = lax.rem(turn, sizes.slots)
            start = (chunk.first_tile + i) * sizes.tile
            first, end = begin - start, chunk.length - start  # what is seen, as positions in the tile
            partly_seen = end < sizes.tile if softmax.window is None else (end < sizes.tile) | (first > 0)
            plgpu.barrier_wait(refs.full.at[slot])
            key_scales, value_scales = tile_scales(refs, slot, 0, first, end)
            if sizes.in_registers:
                if not sizes.scaled:
                    pl.when(partly_seen)(functools.partial(clear_unseen, refs.kv_smem.at[slot, 1], first, end))
                products, tile_values = _narrow_product(refs, slot, q_slot, sizes)
            else:
                products, tile_values = _product(refs.kv_smem.at[slot, 0], refs.q_smem.at[q_slot], sizes), None
            scores = softmax.scores(scaled(products, key_scales, 0))
            position = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
            seen = position < end
            if softmax.window is not None:
                seen &= position >= first
            scores = jnp.where(seen, scores, -jnp.inf)
            new_largest = jnp.maximum(largest, scores.max(axis=0))
            decay = jnp.exp2(largest - new_largest)
            weights = jnp.exp2(scores - _spread(new_largest, scores.shape))
            # Every thread has the sums of its own rows, which are added up once, at the end.
            weight = weight * _spread(decay, weight.shape) + weights
            values = values * _spread(decay, values.shape)
            weights = scaled(weights, value_scales, 0)
            refs.weights_smem.at[worker].transpose(TURN)[...] = weights.astype(sizes.dtype)
            if tile_values is None:
                pl.when(partly_seen)(functools.partial(clear_unseen, refs.kv_smem.at[slot, 1], first, end))
            plgpu.commit_smem()
            values = _add_product(values, tile_values, refs, slot, worker)
            if not sizes.in_registers:
                plgpu.barrier_arrive(refs.empty.at[slot])
            return values, new_largest, weight, turn + 1

        none = _zeros(sizes.head_dim, queries), _per_column(queries, -jnp.inf), _zeros(sizes.tile, queries), turns.tiles
        values, largest, weight, _ = lax.fori_loop(0, chunk.num_tiles, attend_tile, none)
        plgpu.barrier_arrive(refs.q_empty.at[q_slot])
        total = weight.sum(axis=0)
        refs.exponents[chunk.row, chunk.number, pl.ds(0, queries)] = largest + jnp.log2(total)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before
        average = values * _spread(1.0 / total, values.shape)
        if sizes.in_registers:
            refs.out_smem[worker] = gpu_decode_narrow.turned_back(average)
        else:
            refs.out_smem.at[worker].transpose(TURN)[...] = plgpu.layout_cast(average, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        group = refs.out_smem.at[worker, pl.ds(sizes.first_q_row(chunk.row), sizes.group)]
        plgpu.copy_smem_to_gmem(group, refs.averages.at[chunk.row, chunk.number])
        return Turns(turns.tiles + chunk.num_tiles, turns.chunks + 1)

    for_each_chunk(refs, sizes, visit)
    plgpu.wait_smem_to_gmem(0)


def _product(keys_ref: Any, q_ref: Any, sizes: Sizes) -> Array:
    """Keys times queries: [tile, Q]."""

    def multiply(products_ref: Any) -> Array:
        plgpu.wgmma(products_ref, keys_ref, q_ref.transpose(TURN))
        return products_ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((sizes.tile, sizes.q_rows), jnp.float32))


def _narrow_product(refs: Refs, slot: Array, q_slot: Array, sizes: Sizes) -> tuple[Array, Array]:
    """The same of 8-bit keys, and the tile's values [H, tile] in 16 bits. The slot is free then."""
    keys = gpu_decode_narrow.load_keys(refs.kv_smem.at[slot, 0])
    values = gpu_decode_narrow.load_values(refs.kv_smem.at[slot, 1])
    plgpu.barrier_arrive(refs.empty.at[slot])

    def multiply(products_ref: Any) -> tuple[Array, Array]:
        queries = refs.q_smem.at[q_slot].transpose(TURN)
        plgpu.wgmma(products_ref, gpu_decode_narrow.keys(keys, sizes.dtype), queries)
        wide = gpu_decode_narrow.values(values, sizes.dtype)
        return products_ref[...], wide

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((sizes.tile, sizes.q_rows), jnp.float32))


def _add_product(sums: Array, values: Array | None, refs: Refs, slot: Array, worker: Array) -> Array:
    """`sums` [H, Q] plus values [H, tile], from registers or else from a slot, times a worker's weights."""

    def multiply(sums_ref: Any) -> None:
        # Taken from its buffer in here: Pallas does not lower a part that is taken outside.
        left = refs.kv_smem.at[slot, 1].transpose(TURN) if values is None else values
        plgpu.wgmma(sums_ref, left, refs.weights_smem.at[worker].transpose(TURN))

    total: Any = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(sums))
    return total


def _zeros(rows: int, columns: int) -> Array:
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


def _per_column(columns: int, value: float) -> Array:
    return plgpu.layout_cast(jnp.full((columns,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(0))


def _spread(per_column: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(per_column, shape, [1])
