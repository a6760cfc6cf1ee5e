"""The experts of a decode batch on Hopper, at the speed at which memory gives their weights.

As in `kernels/matmul/gpu.py`, a weight is the left operand and all tokens are the free dimension, for each expert that
any token has chosen: to read a weight is what takes time, not to multiply also the tokens that did not choose it. Those
get a share of 0, so that what they add is nothing. Two kernels of the chain:

- gate and up, `x` times each expert's weight: [touched, tokens, F], times the share;
- down, one sum over all F of all touched experts: a piece of work is some rows of the result and a part of every
  expert's F, so that work is even whatever experts there are, and a token's sum is cut at the same places always.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.chain import padded
from hex_llm.kernels.gpu_gate import gated
from hex_llm.kernels.grouped_matmul.gpu_ring import Ring, Work, run
from hex_llm.kernels.hopper import MMA_ROWS, num_sms
from hex_llm.pytree import pytree

SHARED_BYTES = 222 * 1024  # for the ring: of 227 KB, so that a small kernel can stand beside
MAX_SPLITS = 8
WORD = 32  # bits


@dataclass(frozen=True)
class Plan:
    """How the product with a weight of every expert is cut."""

    rows: int  # of the weight, for one block at a time; of the gate and up together
    depth: int  # columns of the weight in one slot of the ring
    splits: int = 1  # parts of F, each a piece of work of its own
    slots: int | None = None  # of the ring; as many as fit if not given
    blocks: int | None = None  # at a time; one for each SM if not given


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


def gate_up_plan(tokens: int, size: int, width: int) -> Plan:
    """For weights [E, 2F, D]: `size` is F, `width` D."""
    rows = next(rows for rows in _heights(tokens, least=2 * MMA_ROWS) if size % (rows // 2) == 0)
    return Plan(rows=rows, depth=_depth(tokens, rows, width))


def down_plan(tokens: int, size: int, width: int) -> Plan:
    """For weights [E, D, F]: `size` is F, `width` D."""
    found = []
    for rows in _heights(tokens, least=MMA_ROWS):
        if width % rows == 0:
            depth = _depth(tokens, rows, size)
            for splits in range(1, MAX_SPLITS + 1):
                if size // depth % splits == 0:
                    pieces = width // rows * splits
                    # Whole rounds of all SMs; of those that are as good the first, which reads the least of `x`.
                    found.append((pieces / (-(-pieces // num_sms()) * num_sms()), Plan(rows, depth, splits)))
    enough = min(0.7, max(share for share, _ in found))
    return next(plan for share, plan in found if share >= enough)


def _heights(tokens: int, least: int) -> list[int]:
    """Rows for a block to try, the better first: a block reads all of `x` for each of its tiles, and tall ones keep
    that well below what it reads of the weight."""
    wanted = max(least, next((rows for rows in (64, 128) if rows >= 2 * tokens), 256))
    return [rows for rows in (256, 128, 64) if least <= rows <= wanted]


def _depth(tokens: int, rows: int, size: int) -> int:
    """Deep slots are the faster ones, where enough of them fit."""
    return 128 if size % 128 == 0 and rows + tokens <= 192 else 64


def ring_slots(tokens: int, plan: Plan) -> int:
    """Slots of the ring of a block: as many as fit, if the plan does not say."""
    return plan.slots or SHARED_BYTES // ((plan.rows + padded(tokens)) * plan.depth * 2)


def experts(
    x: Array,
    gate_up: Array,
    gate_up_bias: Array | None,
    down: Array,
    chosen: Array,
    share: Array,
    *,
    activation: Activation,
    plans: tuple[Plan, Plan] | None = None,
) -> Array:
    """As `reference.experts`, in parts [n, padded(T), D] of float32."""
    tokens, (num_experts, width, size) = chosen.shape[0], down.shape
    if plans is None:
        plans = gate_up_plan(tokens, size, width), down_plan(tokens, size, width)
    batch = padded(tokens)
    x = x[:batch] if x.shape[0] >= batch else jnp.pad(x, ((0, batch - x.shape[0]), (0, 0)))
    which = touched(chosen, share, num_experts)
    hidden = gate_up_product(x, gate_up, gate_up_bias, which, activation=activation, plan=plans[0])
    return down_product(hidden, down, which, plan=plans[1])


@functools.partial(jax.jit, static_argnames=("activation", "plan"))
def gate_up_product(
    x: Array, weight: Array, bias: Array | None, which: Touched, *, activation: Activation, plan: Plan
) -> Array:
    """[rows, D] x [E, 2F, D] -> [most touched, rows, F] in the type of `x`, by the share; written for the touched."""
    batch, width = x.shape
    size, most = weight.shape[1] // 2, which.order.shape[0] - 1
    ring = _ring(batch, plan, x.dtype, weights=2)
    tiles, steps = size // ring.rows, width // plan.depth
    blocks = min(plan.blocks or num_sms(), most * tiles)

    def body(x_ref, w_ref, order_ref, share_ref, *refs):
        bias_ref, (out_ref, *scratch) = (refs[0], refs[1:]) if bias is not None else (None, refs)

        def place(piece):
            """(which of the touched experts, first row) of a piece of work."""
            number = lax.axis_index("block") + piece * blocks
            return lax.div(number, tiles), lax.rem(number, tiles) * ring.rows

        def weights(piece, step):
            (nth, first), columns = place(piece), pl.ds(step * plan.depth, plan.depth)
            return [w_ref.at[order_ref[1 + nth], pl.ds(first + i * size, ring.rows), columns] for i in range(2)]

        def x_part(_, step):
            return x_ref.at[:, pl.ds(step * plan.depth, plan.depth)]

        def finish(piece, worker, sums):
            nth, first = place(piece)
            expert, row = order_ref[1 + nth], first + worker * MMA_ROWS
            if bias_ref is not None:
                sums = [
                    _add_to_rows(each, bias_ref.at[expert, pl.ds(row + i * size, MMA_ROWS)])
                    for i, each in enumerate(sums)
                ]
            share = _load(share_ref.at[expert], plgpu.Layout.WGMMA.reduce(0))
            share = lax.broadcast_in_dim(share, sums[0].shape, [1])
            # A token that did not choose the expert must not get as much as the NaN of 0 times infinity.
            result = jnp.where(share != 0, gated(activation, *sums) * share, 0.0)
            _store(out_ref.at[nth, :, pl.ds(row, MMA_ROWS)], result.astype(x.dtype))

        def work():
            plgpu.griddepcontrol_wait()
            pieces = lax.div(order_ref[0] * tiles - lax.axis_index("block") + blocks - 1, blocks)
            return Work(pieces, steps, weights, x_part, finish, early=False)

        run(ring, work, *scratch)

    arrays = [x, weight, which.order, which.share] + ([] if bias is None else [bias])
    return _kernel(body, (most, batch, size), x.dtype, ring, blocks)(*arrays)


@functools.partial(jax.jit, static_argnames="plan")
def down_product(hidden: Array, weight: Array, which: Touched, *, plan: Plan) -> Array:
    """[most touched, rows, F] x [E, D, F] -> [splits, rows, D] float32, to be added.

    Which experts are touched must have been written before the kernel in front began: it is read before that ends.
    """
    _, batch, size = hidden.shape
    width = weight.shape[1]
    ring = _ring(batch, plan, hidden.dtype, weights=1)
    tiles, steps = width // plan.rows, size // plan.depth // plan.splits
    blocks = min(plan.blocks or num_sms(), tiles * plan.splits)

    def body(hidden_ref, w_ref, order_ref, out_ref, *scratch):
        block = lax.axis_index("block")

        def place(piece):
            """(first row, split) of a piece of work."""
            number = block + piece * blocks
            return lax.rem(number, tiles) * plan.rows, lax.div(number, tiles)

        def columns(split, step):
            return pl.ds((split * steps + lax.rem(step, steps)) * plan.depth, plan.depth)

        def weights(piece, step):
            first, split = place(piece)
            expert = order_ref[1 + lax.div(step, steps)]
            return [w_ref.at[expert, pl.ds(first, plan.rows), columns(split, step)]]

        def hidden_part(piece, step):
            return hidden_ref.at[lax.div(step, steps), :, columns(place(piece)[1], step)]

        def finish(piece, worker, sums):
            first, split = place(piece)
            _store(out_ref.at[split, :, pl.ds(first + worker * MMA_ROWS, MMA_ROWS)], sums[0])

        def work():
            pieces = lax.div(tiles * plan.splits - block + blocks - 1, blocks)
            return Work(pieces, order_ref[0] * steps, weights, hidden_part, finish, early=True)

        run(ring, work, *scratch)

    kernel = _kernel(body, (plan.splits, batch, width), jnp.float32, ring, blocks)
    return kernel(hidden, weight, which.order)


def _ring(batch: int, plan: Plan, dtype: Any, *, weights: int) -> Ring:
    return Ring(ring_slots(batch, plan), weights, plan.rows // weights, plan.depth, batch, dtype)


def _kernel(body: Any, shape: tuple[int, ...], dtype: Any, ring: Ring, blocks: int) -> Any:
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=ring.workers + 1,
        thread_name="worker",
        scratch_types=ring.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


def _load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _add_to_rows(sums: Array, bias_ref: Any) -> Array:
    return sums + lax.broadcast_in_dim(_load(bias_ref, plgpu.Layout.WGMMA.reduce(1)), sums.shape, [0])


def _store(ref: Any, result: Array) -> None:
    """Turned round, each thread has two neighbours of one token, and a warp writes whole sectors."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
