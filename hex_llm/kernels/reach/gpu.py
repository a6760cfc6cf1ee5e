"""The reach on Hopper: a fixed number of kernels, each one pass over the logits of the rows that are not settled yet.

A block weighs a part of one row within several limits at a time. Before that it adds up what all blocks of its row
found in the pass before, which tells it the range that is left, so that nothing else runs between two passes. A pass
over settled rows costs no more than its launch; most rows are settled after four or five, and those without a filter
from the start.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.reach.filters import ALL, GRAIN, Filters, grains_per_logit, reach_of_min_p

_WAYS = 8  # each pass divides by this the range in which the reach can lie
_PASSES = 8  # for top_k, and again for top_p: _WAYS ** _PASSES == ALL
_UNIT = 256  # logits that a block takes at a time, 2 to a thread
_UNROLL = 8  # units whose loads are under way together
_PARTS = 16  # of a row at least, a block for each: what they find fills a vector of 128
_MOST_PARTS = 64
_BLOCKS = 1024  # of a pass, if it takes more parts than that to have as many: about 8 for each SM
_PRECISE = 2.0**-14  # what a mass must be of the total to be seen in it

_TOP_P = 3  # the column of it in what is known of a row
# Where the search stands: `reach` lies above `low` and at or below `low + width`. A negative `low` is a settled reach.
_LOW, _WIDTH, _TOTAL_LOW, _TOTAL_HIGH, _TARGET, _REACH = range(6)


@jax.jit
def reach(logits: Array, filters: Filters) -> Array:
    """See `reference.reach`. It may be a longer one here, but not by a token."""
    rows, vocab = logits.shape
    logits = jnp.pad(logits, ((0, 0), (0, -vocab % _UNIT)), constant_values=-jnp.inf)
    parts = _PARTS
    while parts < _MOST_PARTS and parts * rows < _BLOCKS:
        parts *= 2
    columns = jnp.stack([grains_per_logit(filters), filters.peak, filters.top_k, filters.top_p], axis=1)
    longest = reach_of_min_p(filters)
    state = jnp.stack(_start(jnp.isinf(filters.top_k), longest), axis=1)
    found = jnp.zeros((rows, parts * _WAYS), jnp.float32)
    for by_mass in (False, True):
        for number in range(_PASSES):
            state, found = _pass(logits, columns, state, found, by_mass=by_mass, first=number == 0)
    sums = jnp.sum(found.reshape(rows, parts, _WAYS), axis=1)
    state = _narrow(list(state.T), list(sums.T), columns[:, _TOP_P], by_mass=True)
    return jnp.minimum(state[_REACH], -state[_LOW])


def _start(settled: Array, longest: Array) -> list[Array]:
    """A search that has not begun, or that need not."""
    zero = longest * 0
    return [jnp.where(settled, -longest, zero), zero + ALL, zero, zero + jnp.inf, zero - 1, longest]


def _narrow(state: Sequence[Array], sums: Sequence[Array], share: Array, *, by_mass: bool) -> list[Array]:
    """Where the search stands after a pass: for one row, or all of them. `share` is top_k or top_p."""
    low, width, total_low, total_high, target, longest = state
    width = width / _WAYS
    target = jnp.where(target < 0, share * sums[_WAYS - 1], target) if by_mass else share
    ways = low * 0
    new_low, new_high = total_low, total_high
    for total in sums[: _WAYS - 1]:
        less = total < target
        ways = ways + jnp.where(less, 1.0, 0.0)
        new_low = jnp.where(less, jnp.maximum(new_low, total), new_low)
        new_high = jnp.where(less, new_high, jnp.minimum(new_high, total))
    found = low + ways * width
    if by_mass:
        # The lightest token that can be in the range.
        least = jnp.exp2((found + width) * (-GRAIN * math.log2(math.e)))
        one = (new_high - new_low < 1.5 * least) & (least > _PRECISE * new_high)
    else:
        one = (new_high - new_low <= 1) | (new_high == target)
    found = jnp.where(one | (width <= 1), -(found + width), found)
    settled = low < 0
    new = [found, width, new_low, new_high, target, longest]
    return [jnp.where(settled, before, after) for before, after in zip(state, new, strict=True)]


@functools.partial(jax.jit, static_argnames=("by_mass", "first"))
def _pass(
    logits: Array, columns: Array, state: Array, found: Array, *, by_mass: bool, first: bool
) -> tuple[Array, Array]:
    """What is known at the beginning of this pass, and what its blocks find: the weights within each limit."""
    rows, parts = found.shape[0], found.shape[1] // _WAYS
    units = logits.shape[1] // _UNIT
    layout = plgpu.Layout.WG_STRIDED((_UNIT,), 2)

    def body(logits_ref, columns_ref, state_ref, found_ref, new_state_ref, new_found_ref):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        scale, peak, top_k, top_p = (columns_ref[row, i] for i in range(4))
        state = [state_ref[row, i] for i in range(6)]
        if by_mass or not first:
            counted = by_mass == first  # in the pass before

            def narrow():
                flat = plgpu.Layout.WG_STRIDED((parts * _WAYS,), 1)
                values = plgpu.load(found_ref.at[row], layout=flat, optimized=False)
                way = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=flat) & (_WAYS - 1)
                sums = [jnp.sum(jnp.where(way == i, values, 0.0)) for i in range(_WAYS)]
                return tuple(_narrow(state, sums, top_k if counted else top_p, by_mass=not counted))

            state = list(lax.cond(state[_LOW] < 0, lambda: tuple(state), narrow))
            if by_mass and first:
                state = _start(top_p == jnp.inf, jnp.minimum(state[_REACH], -state[_LOW]))

        @pl.when(part == 0)
        def _():
            for i, value in enumerate(state):
                new_state_ref[row, i] = value

        low, width, longest = state[_LOW], state[_WIDTH] / _WAYS, state[_REACH]
        limits = [low + width * way for way in range(1, _WAYS)]
        if by_mass and first:
            limits.append(longest)

        @pl.when(low >= 0)
        def _():
            begin, end = lax.div(part * units, parts), lax.div((part + 1) * units, parts)

            def weigh(turn, sums):
                firsts = [begin + turn * _UNROLL + i for i in range(_UNROLL)]
                values = [
                    plgpu.load(
                        logits_ref.at[row, pl.ds(jnp.minimum(unit, units - 1) * _UNIT, _UNIT)],
                        layout=layout,
                        optimized=False,
                    )
                    for unit in firsts
                ]
                for unit, value in zip(firsts, values, strict=True):
                    depths = (jnp.where(unit < end, peak, jnp.inf) - value) * scale
                    weight = jnp.exp2(depths * (-GRAIN * math.log2(math.e))) if by_mass else one
                    sums = [s + jnp.where(depths < limit, weight, zero) for s, limit in zip(sums, limits, strict=True)]
                return tuple(sums)

            zero, one = (plgpu.layout_cast(jnp.full((_UNIT,), x, jnp.float32), layout) for x in (0, 1))
            turns = lax.div(end - begin + _UNROLL - 1, _UNROLL)
            sums = lax.fori_loop(0, turns, weigh, (zero,) * len(limits))
            for i, total in enumerate(sums):
                new_found_ref[row, part * _WAYS + i] = jnp.sum(total)

    return plgpu.kernel(
        body,
        kernel_name="reach",
        out_type=[jax.ShapeDtypeStruct(state.shape, jnp.float32), jax.ShapeDtypeStruct(found.shape, jnp.float32)],
        grid=(rows, parts),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(logits, columns, state, found)
