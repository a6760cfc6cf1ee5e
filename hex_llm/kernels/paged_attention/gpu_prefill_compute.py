"""The two warpgroups of prefill attention on Hopper that multiply: a running softmax over tiles of keys.

While the tensor cores multiply for one warpgroup, the other weighs the scores of its last product; each takes its turn.
Within a warpgroup the scores of one tile are multiplied together with the weighted values of the tile before, which are
still under way while those scores are weighed.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.hopper import LOG2E, MMA_ROWS
from hex_llm.kernels.paged_attention import gpu_scales
from hex_llm.kernels.paged_attention.gpu_prefill_sizes import Refs, Sizes, for_each_item
from hex_llm.kernels.paged_attention.gpu_scales import scaled

LOWEST = -1e30  # finite: a row that has seen nothing yet must not make NaN

type Item = dict[str, Array]
type Softmax = tuple[Array, Array, Array, Array]  # weights of a tile, largest score, sum of weights, decay of the sums


def compute(refs: Refs, sizes: Sizes, blocks: int, warpgroup: Array) -> None:
    pl.when(warpgroup == 1)(lambda: _pass_turn(refs, warpgroup))

    def one_item(n: Array, item: Item, head: Array, step: Array) -> Array:
        slot = lax.rem(n, sizes.q_slots)
        # A sink is a score that was seen before.
        seen = _per_row(LOWEST), _per_row(0.0)
        if refs.sinks is not None:
            rows = refs.sinks.at[head, pl.ds(warpgroup * MMA_ROWS, MMA_ROWS)]
            seen = plgpu.load(rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False), _per_row(1.0)
        plgpu.barrier_wait(refs.q_full.at[slot])
        queries = refs.q_smem.at[slot, pl.ds(warpgroup * MMA_ROWS, MMA_ROWS)]

        def attend(sums_ref: Any) -> tuple[Array, Array, Array, Array]:
            return _attend(refs, sizes, warpgroup, item, queries, refs.q_empty.at[slot], step, seen, sums_ref)

        accumulator = plgpu.WGMMAAccumulatorRef((MMA_ROWS, sizes.head_dim), jnp.float32)
        step, largest, total, sums = pl.run_scoped(attend, accumulator)
        sums *= lax.broadcast_in_dim(jnp.where(total > 0, 1.0 / total, 0.0), sums.shape, [0])
        out = refs.out
        if refs.weights is not None:
            out = out.at[item["chunk"]]
            rows = pl.ds(warpgroup * MMA_ROWS, MMA_ROWS)
            refs.weights[item["part"], head, rows] = jnp.where(total > 0, largest + jnp.log2(total), -jnp.inf)
        _store(refs, sizes, warpgroup, item, head, sums, out)
        return step

    for_each_item(refs, sizes, blocks, one_item)
    plgpu.wait_smem_to_gmem(0)
    pl.when(warpgroup == 0)(lambda: _take_turn(refs, warpgroup))


def _take_turn(refs: Refs, warpgroup: Array) -> None:
    plgpu.barrier_wait(refs.turn.at[warpgroup])


def _pass_turn(refs: Refs, warpgroup: Array) -> None:
    plgpu.barrier_arrive(refs.turn.at[1 - warpgroup])


def _attend(
    refs: Refs,
    sizes: Sizes,
    warpgroup: Array,
    item: Item,
    queries: Any,
    q_empty: Any,
    first_step: Array,
    seen: tuple[Array, Array],
    sums_ref: Any,
) -> tuple[Array, Array, Array, Array]:
    """The step after the item, and its rows' largest scores, sums of weights, and weighted sums of values. `seen` are
    the first two of these before."""
    stages = sizes.stages
    scores_type = plgpu.WGMMAAccumulatorRef((MMA_ROWS, sizes.kv_tile), jnp.float32)

    def scales(slot: Array, kind: int) -> Array | None:
        """Of the keys or the values of a tile that has come."""
        return None if refs.scales_smem is None else gpu_scales.load(refs.scales_smem.at[slot, kind], 1)

    def wait_for_values(step: Array) -> None:
        plgpu.barrier_wait(refs.v_full.at[lax.rem(step, stages)])

    def settle(step: Array, weights: Array, decay: Array) -> Array:
        """Waits for the product under way, shrinks its sums, and makes the weights of the next one."""
        sums = sums_ref[...]
        pl.when(step > first_step)(lambda: plgpu.barrier_arrive(refs.v_empty.at[lax.rem(step - 1, stages)]))
        sums *= lax.broadcast_in_dim(decay, sums.shape, [0])
        if sizes.scaled:
            wait_for_values(step)
            weights = scaled(weights, scales(lax.rem(step, stages), 1), 1)
        # Left alone, the conversion sinks between two products, which then wait for each other. It cannot come
        # earlier: the new weights take the registers of the old ones, which are read until here.
        weights, sums = lax.optimization_barrier((weights.astype(sizes.dtype), sums))
        sums_ref[...] = sums
        return weights

    def first_tile(scores_ref: Any) -> Array:
        slot = lax.rem(first_step, stages)
        _take_turn(refs, warpgroup)
        plgpu.barrier_wait(refs.k_full.at[slot])
        plgpu.wgmma(scores_ref, queries, refs.k_smem.at[slot].transpose((1, 0)))
        _pass_turn(refs, warpgroup)
        scores = scaled(scores_ref[...], scales(slot, 0), 1)
        plgpu.barrier_arrive(refs.k_empty.at[slot])
        return scores

    def next_tile(tile: Array, carry: tuple[Array, Softmax], masked: bool) -> tuple[Array, Softmax]:
        step, (weights, largest, total, decay) = carry
        slot, next_slot = lax.rem(step, stages), lax.rem(step + 1, stages)
        weights = settle(step, weights, decay)

        def multiply(scores_ref: Any) -> Array:
            _take_turn(refs, warpgroup)
            plgpu.barrier_wait(refs.k_full.at[next_slot])
            if not sizes.scaled:
                wait_for_values(step)
            plgpu.wgmma(scores_ref, queries, refs.k_smem.at[next_slot].transpose((1, 0)))
            plgpu.wgmma(sums_ref, weights, refs.v_smem.at[slot])
            _pass_turn(refs, warpgroup)
            return plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)

        scores = scaled(pl.run_scoped(multiply, scores_type), scales(next_slot, 0), 1)
        plgpu.barrier_arrive(refs.k_empty.at[next_slot])
        return step + 1, _weigh(sizes, warpgroup, item, tile, scores, largest, total, masked)

    low, high = item["low"], item["high"]
    scores = pl.run_scoped(first_tile, scores_type)
    softmax = _weigh(sizes, warpgroup, item, low, scores, *seen, masked=True)
    carry = first_step, softmax
    masked, unmasked = (functools.partial(next_tile, masked=masked) for masked in (True, False))
    edge, diagonal = jnp.maximum(item["edge"], low + 1), jnp.maximum(item["diagonal"], low + 1)
    if sizes.window is not None:
        carry = lax.fori_loop(low + 1, edge, masked, carry)
    carry = lax.fori_loop(edge, diagonal, unmasked, carry)
    step, (weights, largest, total, decay) = lax.fori_loop(diagonal, high, masked, carry)

    plgpu.barrier_arrive(q_empty)
    slot = lax.rem(step, stages)
    weights = settle(step, weights, decay)
    _take_turn(refs, warpgroup)
    if not sizes.scaled:
        wait_for_values(step)
    plgpu.wgmma(sums_ref, weights, refs.v_smem.at[slot])
    _pass_turn(refs, warpgroup)
    sums = sums_ref[...]
    plgpu.barrier_arrive(refs.v_empty.at[slot])
    return step + 1, largest, total, sums


def _weigh(
    sizes: Sizes,
    warpgroup: Array,
    item: Item,
    tile: Array,
    scores: Array,
    largest: Array,
    total: Array,
    masked: bool,
) -> Softmax:
    """The weights of a tile's keys, the running largest score and sum of weights, and how much older sums shrink."""
    factor = sizes.scale * LOG2E
    if sizes.soft_cap is not None:
        scores = _tanh(scores * (sizes.scale / sizes.soft_cap))
        factor = sizes.soft_cap * LOG2E
    if masked:
        row = plgpu.broadcasted_iota(jnp.int32, (MMA_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        token = lax.rem(row + warpgroup * MMA_ROWS, sizes.cell)
        last = lax.broadcast_in_dim(token + (item["position"] - tile * sizes.kv_tile), scores.shape, [0])
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        seen = column <= last
        if sizes.window is not None:
            first = sizes.window.first(token + item["position"]) - tile * sizes.kv_tile
            seen &= column >= lax.broadcast_in_dim(first, scores.shape, [0])
        scores = jnp.where(seen, scores, -jnp.inf)
    new_largest = jnp.maximum(largest, scores.max(axis=1) * factor)
    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_largest, scores.shape, [0]))
    decay = jnp.exp2(largest - new_largest)
    return weights, new_largest, total * decay + weights.sum(axis=1), decay


def _store(refs: Refs, sizes: Sizes, warpgroup: Array, item: Item, first_head: Array, sums: Array, out: Any) -> None:
    """Copies the rows of a warpgroup out, those of the item's own tokens only: the others are another item's."""
    first_row = warpgroup * MMA_ROWS
    cell = sizes.cell

    def one_head(g: Array, columns: Any) -> None:
        low = jnp.maximum(g * cell + item["begin"], first_row)
        high = jnp.minimum(g * cell + item["end"], first_row + MMA_ROWS)
        count = jnp.maximum(high - low, 0)
        # A copy's size is fixed, so the tokens go in powers of two.
        for power in (1 << i for i in reversed(range(min(cell, MMA_ROWS).bit_length()))):
            there = lax.rem(lax.div(count, power), 2) == 1

            @pl.when(there)
            def _copy(low: Array = low, power: int = power) -> None:
                plgpu.copy_smem_to_gmem(
                    refs.out_smem.at[warpgroup, pl.ds(low - first_row, power)],
                    out.at[pl.ds(item["first_token"] + low - g * cell, power), first_head * sizes.group + g, columns],
                    commit_group=False,
                )

            low += jnp.where(there, power, 0)

    begin_head = lax.div(first_row, cell)
    end_head = jnp.minimum(lax.div(first_row + MMA_ROWS + cell - 1, cell), sizes.group)
    for start in sizes.out_starts:
        columns = pl.ds(start, sizes.out_columns)
        # What overlaps with the part before is written after it; otherwise its place has to be free, and no more.
        plgpu.wait_smem_to_gmem(0, wait_read_only=start % sizes.out_columns == 0)
        refs.out_smem[warpgroup] = sums[:, start : start + sizes.out_columns].astype(sizes.out_dtype)
        plgpu.commit_smem()
        lax.fori_loop(begin_head, end_head, lambda g, _, columns=columns: one_head(g, columns), None)
        plgpu.commit_smem_to_gmem_group()


def _per_row(value: float) -> Array:
    return plgpu.layout_cast(jnp.full((MMA_ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _tanh(x: Array) -> Array:
    """From exp2 and rsqrt, which are one instruction each and exact to 22 bits, as the GPU's own tanh is not."""
    root = lax.rsqrt(1.0 + jnp.exp2(x * (2 * LOG2E)))
    return 1.0 - 2.0 * root * root
