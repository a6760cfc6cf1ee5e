"""The experts of a decode batch on Hopper, at the speed at which memory gives their weights.

As in `kernels/matmul/gpu.py`, a weight is the left operand and all tokens are the free dimension, for each expert that
any token has chosen: to read a weight is what takes time, not to multiply also the tokens that did not choose it. Those
get a share of 0, so that what they add is nothing. Two kernels of the chain:

- gate and up, `x` times each expert's weight: [touched, tokens, F], times the share;
- down, one sum over all F of all touched experts: a piece of work is some rows of the result and a part of every
  expert's F, so that work is even whatever experts there are, and a token's sum is cut at the same places always.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.chain import padded
from hex_llm.kernels.gpu_gate import gated
from hex_llm.kernels.grouped_matmul.gpu_few_plan import Plan, plans_for, ring_slots
from hex_llm.kernels.grouped_matmul.gpu_left import Place, arrays_of, left_of
from hex_llm.kernels.grouped_matmul.gpu_ring import Ring, Work, run
from hex_llm.kernels.grouped_matmul.gpu_sums import add_to_rows, load, store
from hex_llm.kernels.hopper import MMA_ROWS, num_sms
from hex_llm.kernels.quant_matmul.weight import Matrix
from hex_llm.pytree import pytree

WORD = 32  # bits


@pytree
class Touched:
    """The experts that any token has chosen, and what each gives to whom."""

    order: Array  # [1 + min(E, T k)] int32: how many there are, then which
    share: Array  # [E, rows of tokens] float32, 0 where not chosen


def touched(chosen: Array, share: Array, num_experts: int) -> Touched:
    """In three small operations, because they stand between kernels that wait for them."""
    tokens, k = chosen.shape
    ids = jnp.arange(num_experts, dtype=jnp.int32)
    pad = ((0, padded(tokens) - tokens), (0, 0))
    rows, shares = jnp.pad(chosen, pad, constant_values=-1), jnp.pad(share.astype(jnp.float32), pad)
    terms = [jnp.where(rows[None, :, j] == ids[:, None], shares[None, :, j], 0) for j in range(k)]
    return Touched(
        _in_order(_bits(chosen, num_experts), min(num_experts, chosen.size)), functools.reduce(jnp.add, terms)
    )


def _bits(chosen: Array, num_experts: int) -> Array:
    """A bit for each expert that was chosen, in words of 32."""
    flat = chosen.reshape(1, -1)
    word = jnp.arange(-(-num_experts // WORD), dtype=jnp.int32)[:, None]
    bits = jnp.where(flat // WORD == word, jnp.uint32(1) << (flat % WORD).astype(jnp.uint32), jnp.uint32(0))
    return lax.reduce(bits, jnp.uint32(0), lax.bitwise_or, (1,))


def _in_order(words: Array, most: int) -> Array:
    """How many bits are set, then the numbers of these bits, of which there are at most `most`.

    The n-th is the last place with no more than n bits before it, and is searched by halving: all of it is done for
    each n by itself, and so is one operation.
    """
    num_words = words.shape[0]
    total = num_words * WORD

    def before(place: Array) -> Array:
        counts = []
        for i in range(num_words):
            bits = jnp.clip(place - i * WORD, 0, WORD)
            # A shift by all 32 bits is not defined.
            mask = jnp.where(
                bits == 0, jnp.uint32(0), ~jnp.uint32(0) >> (WORD - jnp.maximum(bits, 1)).astype(jnp.uint32)
            )
            counts.append(lax.population_count(words[i] & mask))
        return functools.reduce(jnp.add, counts).astype(jnp.int32)

    nth = jnp.arange(-1, most, dtype=jnp.int32)
    place = jnp.zeros_like(nth)
    for step in (1 << i for i in reversed(range((total - 1).bit_length()))):
        place = jnp.where(before(place + step) <= nth, place + step, place)
    return jnp.where(nth < 0, before(jnp.full_like(nth, total)), jnp.minimum(place, total - 1))


def experts(
    x: Array,
    gate_up: Matrix,
    gate_up_bias: Array | None,
    down: Matrix,
    chosen: Array,
    share: Array,
    *,
    activation: Activation,
    plans: tuple[Plan, Plan] | None = None,
) -> Array:
    """As `reference.experts`, in parts [n, padded(T), D] of float32."""
    tokens, num_experts = chosen.shape[0], down.shape[0]
    if plans is None:
        plans = plans_for(tokens, min(num_experts, chosen.size), gate_up, down)
    batch = padded(tokens)
    # Codes may have columns more than there are, that stand for zeros.
    missing = max(batch - x.shape[0], 0), gate_up.shape[2] - x.shape[1]
    x = jnp.pad(x[:batch], [(0, each) for each in missing]) if any(missing) else x[:batch]
    which = touched(chosen, share, num_experts)
    hidden = gate_up_product(
        x, gate_up, gate_up_bias, which, activation=activation, plan=plans[0], columns=down.shape[2]
    )
    return down_product(hidden, down, which, plan=plans[1])


@functools.partial(jax.jit, static_argnames=("activation", "plan", "columns"))
def gate_up_product(
    x: Array,
    weight: Matrix,
    bias: Array | None,
    which: Touched,
    *,
    activation: Activation,
    plan: Plan,
    columns: int | None = None,
) -> Array:
    """[rows, D] x [E, 2F, D] -> [most touched, rows, F] in the type of `x`, by the share; written for the touched.

    Where more columns than F are asked for, those are zeros.
    """
    batch, width = x.shape
    size, most = weight.shape[1] // 2, which.order.shape[0] - 1
    ring = _ring(batch, plan, weight, x.dtype, weights=2)
    columns = columns or size
    rows, depth = ring.left.rows, ring.left.depth
    tiles, steps = size // rows, width // depth
    blocks = min(plan.blocks or num_sms(), most * tiles)
    arrays = arrays_of(weight)

    def body(x_ref, order_ref, share_ref, *refs):
        w_refs, refs = list(refs[: len(arrays)]), refs[len(arrays) :]
        bias_ref, (out_ref, *scratch) = (refs[0], refs[1:]) if bias is not None else (None, refs)

        def place(piece):
            """(which of the touched experts, first row) of a piece of work."""
            number = lax.axis_index("block") + piece * blocks
            return lax.div(number, tiles), lax.rem(number, tiles) * rows

        def weights(piece, step):
            nth, first = place(piece)
            return [Place(order_ref[1 + nth], first + i * size, step * depth) for i in range(2)]

        def x_part(_, step):
            return x_ref.at[:, pl.ds(step * depth, depth)]

        def finish(piece, worker, sums):
            nth, first = place(piece)
            expert, row = order_ref[1 + nth], first + worker * MMA_ROWS
            if bias_ref is not None:
                sums = [
                    add_to_rows(each, bias_ref.at[expert, pl.ds(row + i * size, MMA_ROWS)])
                    for i, each in enumerate(sums)
                ]
            share = load(share_ref.at[expert], plgpu.Layout.WGMMA.reduce(0))
            share = lax.broadcast_in_dim(share, sums[0].shape, [1])
            # A token that did not choose the expert must not get as much as the NaN of 0 times infinity.
            result = jnp.where(share != 0, gated(activation, *sums) * share, 0.0).astype(x.dtype)
            store(out_ref.at[nth, :, pl.ds(row, MMA_ROWS)], result)
            for column in range(size, columns, MMA_ROWS):
                target = out_ref.at[nth, :, pl.ds(column, MMA_ROWS)]
                pl.when(row == size - MMA_ROWS)(functools.partial(store, target, jnp.zeros_like(result)))

        def work():
            plgpu.griddepcontrol_wait()
            pieces = lax.div(order_ref[0] * tiles - lax.axis_index("block") + blocks - 1, blocks)
            return Work(pieces, steps, w_refs, weights, x_part, finish, early=False)

        run(ring, work, *scratch)

    kernel = ring.kernel(body, (most, batch, columns), x.dtype, blocks)
    return kernel(x, which.order, which.share, *arrays, *([] if bias is None else [bias]))


@functools.partial(jax.jit, static_argnames="plan")
def down_product(hidden: Array, weight: Matrix, which: Touched, *, plan: Plan) -> Array:
    """[most touched, rows, F] x [E, D, F] -> [splits, rows, D] float32, to be added.

    Which experts are touched must have been written before the kernel in front began: it is read before that ends.
    """
    _, batch, size = hidden.shape
    width = weight.shape[1]
    ring = _ring(batch, plan, weight, hidden.dtype, weights=plan.stack)
    rows, depth = ring.left.rows, ring.left.depth
    tiles, steps = width // plan.rows, size // depth // plan.splits
    blocks = min(plan.blocks or num_sms(), tiles * plan.splits)
    arrays = arrays_of(weight)

    def body(hidden_ref, order_ref, *refs):
        w_refs, (out_ref, *scratch) = list(refs[: len(arrays)]), refs[len(arrays) :]
        block = lax.axis_index("block")

        def place(piece):
            """(first row, split) of a piece of work."""
            number = block + piece * blocks
            return lax.rem(number, tiles) * plan.rows, lax.div(number, tiles)

        def column(split, step):
            return (split * steps + lax.rem(step, steps)) * depth

        def weights(piece, step):
            first, split = place(piece)
            expert = order_ref[1 + lax.div(step, steps)]
            return [Place(expert, first + i * rows, column(split, step)) for i in range(plan.stack)]

        def hidden_part(piece, step):
            return hidden_ref.at[lax.div(step, steps), :, pl.ds(column(place(piece)[1], step), depth)]

        def finish(piece, worker, sums):
            first, split = place(piece)
            for i, each in enumerate(sums):
                store(out_ref.at[split, :, pl.ds(first + i * rows + worker * MMA_ROWS, MMA_ROWS)], each)

        def work():
            pieces = lax.div(tiles * plan.splits - block + blocks - 1, blocks)
            return Work(pieces, order_ref[0] * steps, w_refs, weights, hidden_part, finish, early=True)

        run(ring, work, *scratch)

    kernel = ring.kernel(body, (plan.splits, batch, width), jnp.float32, blocks)
    return kernel(hidden, which.order, *arrays)


def _ring(batch: int, plan: Plan, weight: Matrix, dtype: Any, *, weights: int) -> Ring:
    left = left_of(weight, weights=weights, rows=plan.rows // weights, depth=plan.depth)
    return Ring(ring_slots(batch, plan.slots, left), left, weights, batch, dtype)
