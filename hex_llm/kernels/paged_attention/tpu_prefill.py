"""Attention of sequences that have many queries, on TPUs.

A step of the grid is an item: the queries of one sequence that are in one tile. Rows of a tile that are another
sequence's see nothing then, and nothing of their sums changes; only where a tile has such rows, or keys that not all
of them see, are scores masked.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.paged_attention.tpu_blocks import (
    Blocks,
    begin,
    end_block,
    first_block,
    precision,
    quotient,
    remainder,
    scratch,
    take,
)
from hex_llm.kernels.paged_attention.tpu_prefill_plan import POSITION, START, STOP
from hex_llm.kernels.paged_attention.tpu_sizes import LANES, LARGEST_GROUP, LOG2_E, LOWEST, Sizes, prefill_sizes
from hex_llm.kernels.window import Window


class Options(NamedTuple):
    sizes: Sizes
    tile: int  # tokens
    group: int
    scale: float
    window: Window | None
    soft_cap: float | None


class Sums(NamedTuple):
    """Of each row of queries, what it has seen so far."""

    largest: Any  # [K', R, LANES], the same in each lane
    weight: Any  # [K', R, LANES], to be added up
    values: Any  # [K', R, H]


def prefill(
    q: Array,  # [K, T * G, H]: of each kv head, token after token, the heads of its group; T is a multiple of the tile
    pages: Array,  # [P, 2, K, page, H]
    table: Array,  # [S, 1, B]
    items: Array,
    num_items: Array,
    *,
    tile: int,
    group: int,
    scale: float,
    window: Window | None,
    soft_cap: float | None,
    sinks: Array | None,  # [N]
) -> Array:
    """[K, T * G, H]; tiles without an item are left as they were, which is to say as anything."""
    num_kv_heads, _, head_dim = q.shape
    rows = tile * group
    sizes = prefill_sizes(pages.shape, table.shape[2], rows, pages.dtype)
    at_once = sizes.num_kv_heads
    queries = pl.BlockSpec((at_once, rows, head_dim), lambda h, i, items, *_: (h, quotient(items[START, i], tile), 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    in_specs, extra = [anywhere, anywhere, queries], ()
    if sinks is not None:
        each = jnp.maximum(sinks.astype(jnp.float32) * LOG2_E, LOWEST).reshape(num_kv_heads, 1, group)
        each = jnp.broadcast_to(each, (num_kv_heads, tile, group)).reshape(num_kv_heads, rows, 1)
        extra = (jnp.broadcast_to(each, (num_kv_heads, rows, LANES)),)
        in_specs.append(pl.BlockSpec((at_once, rows, LANES), lambda h, *_: (h, 0, 0)))
    return pl.pallas_call(
        partial(
            _kernel,
            options=Options(sizes, tile, group, scale, window, soft_cap),
            has_sinks=sinks is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_kv_heads // at_once, jnp.maximum(num_items[0], 1)),
            in_specs=in_specs,
            out_specs=queries,
            scratch_shapes=[
                pltpu.VMEM((at_once, rows, LANES), jnp.float32),
                pltpu.VMEM((at_once, rows, LANES), jnp.float32),
                pltpu.VMEM((at_once, rows, head_dim), jnp.float32),
                *scratch(sizes, pages.dtype),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), disable_bounds_checks=True
        ),
        name="paged_attention_prefill",
    )(items, num_items, table, pages, q, *extra)


def _kernel(
    items: Any, num_items: Any, table: Any, pages: Any, q: Any, *refs: Any, options: Options, has_sinks: bool
) -> None:
    sinks, (out, *rest) = (refs[0], refs[1:]) if has_sinks else (None, refs)
    sums, blocks = Sums(*rest[:3]), Blocks(items, num_items, table, pages, *rest[3:])
    sizes, tile = options.sizes, options.tile
    first_head, item = pl.program_id(0) * sizes.num_kv_heads, pl.program_id(1)
    end = num_items[0]

    @pl.when(item == 0)
    def _():
        begin(blocks, sizes, first_head)

    def tile_of(item: Array) -> Array:
        return quotient(items[START, item], tile)

    @pl.when((item == 0) | (tile_of(jnp.maximum(item - 1, 0)) != tile_of(item)))
    def _():
        # A sink is a score that was seen already.
        sums.largest[...] = jnp.full(sums.largest.shape, LOWEST) if sinks is None else sinks[...]
        sums.weight[...] = jnp.full(sums.weight.shape, 0.0 if sinks is None else 1 / LANES)
        sums.values[...] = jnp.zeros(sums.values.shape)

    @pl.when(item < end)
    def _():
        start, stop, position = items[START, item], items[STOP, item], items[POSITION, item]
        whole = stop - start == tile
        last = position + (stop - start) - 1

        def block(number: Array, _: None) -> None:
            slot = take(blocks, sizes, item, number, first_head)
            base = number * sizes.block
            all_seen = whole & (base + sizes.block - 1 <= position)
            if options.window is not None:
                all_seen &= base >= options.window.first(last)

            @pl.when(all_seen)
            def _():
                for head in range(sizes.num_kv_heads):
                    _add(q, blocks, sums, head, slot, None, options)

            @pl.when(jnp.logical_not(all_seen))
            def _():
                masks = _seen(start, stop, position, base, remainder(start, tile), options)
                for head in range(sizes.num_kv_heads):
                    _add(q, blocks, sums, head, slot, masks, options)

        lax.fori_loop(first_block(blocks, sizes, item), end_block(blocks, sizes, item), block, None)

    @pl.when((item + 1 >= end) | (tile_of(jnp.minimum(item + 1, items.shape[1] - 1)) != tile_of(item)))
    def _():
        for head in range(sizes.num_kv_heads):
            weight = jnp.sum(sums.weight[head], axis=1, keepdims=True)
            out[head] = (sums.values[head] / jnp.where(weight > 0, weight, 1)).astype(out.dtype)


def _seen(
    start: Array, stop: Array, position: Array, base: Array, offset: Array, options: Options
) -> tuple[Array, Array]:
    """[R, LANES]: whether a row's token is one of the item's; [R, block]: which keys it sees, if it is."""
    rows, block = options.tile * options.group, options.sizes.block
    token = _divided(lax.broadcasted_iota(jnp.int32, (rows, LANES), 0), options.group) - offset
    mine = (token >= 0) & (token < stop - start)
    at = jnp.where(mine, position + token, -1)
    key = base + lax.broadcasted_iota(jnp.int32, (rows, block), 1)
    seen = key <= _widened(at, block)
    if options.window is not None:
        seen &= key >= _widened(options.window.first(jnp.maximum(at, 0)), block)
    return mine, seen


def _divided(row: Array, group: int) -> Array:
    """Rounded down, which a product and a shift do for up to 4096 rows of groups of up to 16."""
    if group & (group - 1) == 0:
        return lax.shift_right_logical(row, jnp.full(row.shape, group.bit_length() - 1, jnp.int32))
    assert group <= LARGEST_GROUP, "larger groups are powers of two"
    return lax.shift_right_logical(row * -(-(1 << 16) // group), jnp.full(row.shape, 16, jnp.int32))


def _add(
    q: Any, blocks: Blocks, sums: Sums, head: int, slot: Array, masks: tuple[Array, Array] | None, options: Options
) -> None:
    """A block of keys and values to the sums of a kv head's rows."""
    scale, soft_cap = options.scale, options.soft_cap
    multiply = partial(lax.dot_general, preferred_element_type=jnp.float32, precision=precision(q.dtype))
    scores = multiply(q[head], blocks.ring[slot, 0, head].astype(q.dtype), (((1,), (1,)), ((), ())))
    if soft_cap is None:
        scores *= scale * LOG2_E
    else:
        scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2_E)
    if masks is not None:
        scores = jnp.where(masks[1], scores, LOWEST)
    before = sums.largest[head]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    # A row that has seen nothing so far must not give weight to what it does not see now.
    largest = now if masks is None else jnp.maximum(now, LOWEST / 2)
    weights = jnp.exp2(scores - _widened(largest, scores.shape[1]))
    shrink = jnp.exp2(before - now)
    parts = [weights[:, i : i + LANES] for i in range(0, weights.shape[1], LANES)]
    sums.weight[head] = sums.weight[head] * shrink + sum(parts[1:], parts[0])
    sums.largest[head] = now
    added = multiply(weights.astype(q.dtype), blocks.ring[slot, 1, head].astype(q.dtype), (((1,), (0,)), ((), ())))
    if masks is not None:
        # Of another sequence's values nothing may come to a row, not even 0 times NaN.
        added = jnp.where(_widened(masks[0], added.shape[1]), added, 0)
    sums.values[head] = sums.values[head] * _widened(shrink, added.shape[1]) + added


def _widened(x: Array, width: int) -> Array:
    """[R, LANES], the same in each lane, as [R, width]."""
    if width <= LANES:
        return x[:, :width]
    whole, rest = divmod(width, LANES)
    return jnp.concatenate([x] * whole + ([x[:, :rest]] if rest else []), axis=1)
