"""Attention of sequences that have one query each, on TPUs.

All query heads are multiplied with the keys of every kv head, and of the products those are kept that belong together:
the products cost what loading keys into the matrix unit costs, and no row has to be moved.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.paged_attention.tpu_blocks import (
    FIRST,
    LIMIT,
    Blocks,
    begin,
    end_block,
    first_block,
    precision,
    scratch,
    take,
)
from hex_llm.kernels.paged_attention.tpu_sizes import LOG2_E, LOWEST, Sizes, decode_sizes, queries_at_once
from hex_llm.kernels.window import Window


def plan_decode(kv_len: Array, num_seqs: Array, window: Window | None) -> tuple[Array, Array]:
    """The items [3, S] of sequences whose last token looks back, and how many there are, [1]."""
    row = jnp.arange(kv_len.shape[0], dtype=jnp.int32)
    first = jnp.zeros_like(kv_len) if window is None else window.first(jnp.maximum(kv_len - 1, 0))
    return jnp.stack([row, first, kv_len]), num_seqs.reshape(1)


def decode(
    q: Array,  # [S, N, H]
    pages: Array,  # [P, 2, K, page, H]
    table: Array,  # [S or more, 1, B]
    items: Array,
    num_items: Array,
    *,
    scale: float,
    window: Window | None,
    soft_cap: float | None,
    sinks: Array | None,
) -> Array:
    """[S, N, H]; rows past the items are 0."""
    num_seqs, num_heads, head_dim = q.shape
    sizes = decode_sizes(pages.shape, table.shape[2], pages.dtype, window)
    rows = min(queries_at_once(num_heads, head_dim, q.dtype), num_seqs)
    extra = () if sinks is None else (jnp.maximum(sinks.astype(jnp.float32) * LOG2_E, LOWEST)[:, None],)
    queries = pl.BlockSpec((rows, num_heads, head_dim), lambda i, *_: (i, 0, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_kernel, sizes=sizes, scale=scale, soft_cap=soft_cap, has_sinks=sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(num_seqs, rows),),
            in_specs=[anywhere, anywhere, queries, *(pl.BlockSpec(e.shape, lambda *_: (0, 0)) for e in extra)],
            out_specs=queries,
            scratch_shapes=scratch(sizes, pages.dtype),
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        name="paged_attention_decode",
    )(items, num_items, table, pages, q, *extra)


def _kernel(
    items: Any, num_items: Any, table: Any, pages: Any, q: Any, *refs: Any,
    sizes: Sizes, scale: float, soft_cap: float | None, has_sinks: bool,
) -> None:  # fmt: skip
    sinks, (out, *rest) = (refs[0], refs[1:]) if has_sinks else (None, refs)
    blocks = Blocks(items, num_items, table, pages, *rest)
    rows, num_heads, head_dim = q.shape
    group = num_heads // sizes.num_kv_heads
    base = pl.program_id(0) * rows

    @pl.when(base == 0)
    def _():
        begin(blocks, sizes, 0)

    def of_head(products: list[Array]) -> Array:
        """From [N, ...] for each kv head, the rows of its group."""
        out = products[-1]
        head = lax.broadcasted_iota(jnp.int32, out.shape, 0)
        for i in reversed(range(len(products) - 1)):
            out = jnp.where(head < (i + 1) * group, products[i], out)
        return out

    multiply = partial(lax.dot_general, preferred_element_type=jnp.float32, precision=precision(q.dtype))

    def sequence(row: Array, _: None) -> None:
        item = base + row
        queries, first, limit = q[row], items[FIRST, item], items[LIMIT, item]

        def block(number: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, weight, values = sums
            slot = take(blocks, sizes, item, number, 0)
            heads = range(sizes.num_kv_heads)
            keys, many = (lambda h: blocks.ring[slot, 0, h].astype(q.dtype)), (((1,), (1,)), ((), ()))
            scores = of_head([multiply(queries, keys(h), many) for h in heads])
            if soft_cap is None:
                scores *= scale * LOG2_E
            else:
                scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2_E)
            key = number * sizes.block + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            scores = jnp.where((key >= first) & (key < limit), scores, LOWEST)
            now = jnp.maximum(largest, jnp.max(scores, axis=1, keepdims=True))
            shrink, weights = jnp.exp2(largest - now), jnp.exp2(scores - now)
            weight = weight * shrink + jnp.sum(weights, axis=1, keepdims=True)
            weights = weights.astype(q.dtype)
            values_of, one = (lambda h: blocks.ring[slot, 1, h].astype(q.dtype)), (((1,), (0,)), ((), ()))
            added = of_head([multiply(weights, values_of(h), one) for h in heads])
            return now, weight, values * shrink + added

        none = jnp.zeros((num_heads, 1), jnp.float32)
        # A sink is a score that was seen already.
        start = (none + LOWEST, none) if sinks is None else (sinks[...], none + 1)
        start = (*start, jnp.zeros((num_heads, head_dim), jnp.float32))
        stop = end_block(blocks, sizes, item)
        _, weight, values = lax.fori_loop(first_block(blocks, sizes, item), stop, block, start)
        out[row] = (values / weight).astype(out.dtype)

    out[...] = jnp.zeros(out.shape, out.dtype)
    lax.fori_loop(0, jnp.clip(num_items[0] - base, 0, rows), sequence, None)
