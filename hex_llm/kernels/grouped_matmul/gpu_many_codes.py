"""The experts of a large batch on Hopper, with weights in few bits.

As in `gpu_many.py` rows are in order of their experts, a tile of them is multiplied with one expert's weight, and tiles
that run at the same time lie in a band. But what is decoded is in registers, and those are the left operand: the weight
has the rows of a product here, and the tokens of a tile are its columns. Every warpgroup multiplies two pieces of the
weight side by side where it can, gate and up or neighbours, while it decodes the next.

No weight is ever there in more bits than it has, but for the piece that a warpgroup multiplies.
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
from hex_llm.kernels.gpu_gate import gated
from hex_llm.kernels.grouped_matmul.gpu_band import in_bands
from hex_llm.kernels.grouped_matmul.gpu_few_plan import ring_slots
from hex_llm.kernels.grouped_matmul.gpu_left import Place, arrays_of, left_of
from hex_llm.kernels.grouped_matmul.gpu_ring import Ring, Work, run
from hex_llm.kernels.grouped_matmul.gpu_sums import add_to_rows, store
from hex_llm.kernels.grouped_matmul.groups import Groups, combine, group_rows
from hex_llm.kernels.hopper import MMA_ROWS, num_sms
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, Packed


@dataclass(frozen=True)
class Plan:
    """How a grouped product is cut."""

    tokens: int  # of a tile
    workers: int  # warpgroups that multiply, at most 3
    weights: int = 2  # pieces of 64 rows that each of them multiplies side by side
    band: int = 1024  # rows whose tiles run side by side
    slots: int | None = None  # of the ring; as many as fit if not given
    blocks: int | None = None  # at a time; one for each SM if not given

    @property
    def rows(self) -> int:
        """Of the weight, for one block at a time."""
        return self.workers * self.weights * MMA_ROWS


def tile_tokens(rows: int, num_experts: int, size: int) -> int:
    """Tokens of a tile, for so many rows of all experts, and F: few experts are to have more, or they would be decoded
    twice, and more than an expert has are padding."""
    largest = 64 if _warpgroups(size // MMA_ROWS) == 3 else 128
    return next((tokens for tokens in (32, 64) if 2 * tokens * num_experts >= 3 * rows), largest)


def _warpgroups(tiles: int) -> int:
    """That share so many pieces of 64 rows. Three have registers for the gate and up of 64 tokens, others of 128."""
    return next(workers for workers in (2, 3, 1) if tiles % workers == 0)


def plan_for(tokens: int, out: int, *, gated: bool) -> Plan:
    """The plan for tiles of so many tokens and a weight of `out` rows, a multiple of 64, or of 128 with a gate."""
    tiles = out // MMA_ROWS
    if gated:
        return Plan(tokens, _warpgroups(tiles // 2), 2)
    return Plan(tokens, 2, 2) if tiles % 4 == 0 else Plan(tokens, _warpgroups(tiles), 1)


def experts(
    x: Array,
    gate_up: Packed,
    gate_up_bias: Array | None,
    down: Packed,
    chosen: Array,
    share: Array,
    *,
    activation: Activation,
    plans: tuple[Plan, Plan] | None = None,
) -> Array:
    """As `reference.experts`, but [1, T, D] in the type of `x`."""
    num_experts, width, size = down.shape
    if plans is None:
        tokens = tile_tokens(chosen.size, num_experts, gate_up.shape[1] // 2)
        plans = plan_for(tokens, gate_up.shape[1], gated=True), plan_for(tokens, width, gated=False)
    groups = group_rows(chosen, num_experts, plans[0].tokens)
    # Codes may have columns more than there are, that stand for zeros.
    rows = jnp.pad(x, ((0, 0), (0, gate_up.shape[2] - width)))[groups.token]
    hidden = product(rows, gate_up, gate_up_bias, groups, activation=activation, plan=plans[0], columns=size)
    out = product(hidden, down, None, groups, plan=plans[1])
    return combine(out, groups, share).astype(x.dtype)[None]


@functools.partial(jax.jit, static_argnames=("activation", "plan", "columns"))
def product(
    x: Array,
    weight: Packed,
    bias: Array | None,
    groups: Groups,
    *,
    activation: Activation | None = None,
    plan: Plan,
    columns: int | None = None,
) -> Array:
    """As `gpu_many.product`; where more columns than the result has are asked for, those are zeros."""
    out, size = weight.shape[1] // (2 if activation else 1), x.shape[1]
    ring = _ring(weight, plan, x.dtype)
    rows = plan.workers * MMA_ROWS  # of each piece of the weight
    stride = rows if activation else plan.rows  # columns of the result of a piece of work
    apart = out if activation else rows  # from the first piece of the weight to the second
    across, steps = out // stride, size // HOPPER_COLUMNS
    columns = columns or out
    band = max(1, plan.band // plan.tokens)
    blocks = min(plan.blocks or num_sms(), groups.expert.shape[0] * across)
    arrays = arrays_of(weight)

    def body(x_ref, count_ref, expert_ref, *refs):
        w_refs, refs = list(refs[: len(arrays)]), refs[len(arrays) :]
        bias_ref, (out_ref, *scratch) = (refs[0], refs[1:]) if bias is not None else (None, refs)
        block = lax.axis_index("block")

        def place(piece):
            """(tile, first column of the result) of a piece of work."""
            tile, column = in_bands(block + piece * blocks, count_ref[0], across, band)
            return tile, column * stride

        def weights(piece, step):
            tile, first = place(piece)
            expert = expert_ref[tile]
            return [Place(expert, first + i * apart, step * HOPPER_COLUMNS) for i in range(plan.weights)]

        def tokens_of(tile):
            return pl.ds(tile * plan.tokens, plan.tokens)

        def x_part(piece, step):
            return x_ref.at[tokens_of(place(piece)[0]), pl.ds(step * HOPPER_COLUMNS, HOPPER_COLUMNS)]

        def finish(piece, worker, sums):
            tile, first = place(piece)
            column = first + worker * MMA_ROWS
            if bias_ref is not None:
                expert = expert_ref[tile]
                sums = [
                    add_to_rows(each, bias_ref.at[expert, pl.ds(column + i * apart, MMA_ROWS)])
                    for i, each in enumerate(sums)
                ]
            if activation:
                sums = [gated(activation, *sums)]
            for i, each in enumerate(sums):
                store(out_ref.at[tokens_of(tile), pl.ds(column + i * apart, MMA_ROWS)], each.astype(x.dtype))
            for more in range(out, columns, MMA_ROWS):
                zeros = jnp.zeros_like(sums[0].astype(x.dtype))
                target = out_ref.at[tokens_of(tile), pl.ds(more, MMA_ROWS)]
                pl.when(column == out - MMA_ROWS)(functools.partial(store, target, zeros))

        def work():
            plgpu.griddepcontrol_wait()
            pieces = lax.div(count_ref[0] * across - block + blocks - 1, blocks)
            return Work(pieces, steps, w_refs, weights, x_part, finish, early=False)

        run(ring, work, *scratch)

    kernel = ring.kernel(body, (x.shape[0], columns), x.dtype, blocks)
    return kernel(x, groups.num_tiles, groups.expert, *arrays, *([] if bias is None else [bias]))


def _ring(weight: Packed, plan: Plan, dtype: Any) -> Ring:
    left = left_of(weight, weights=plan.weights, rows=plan.workers * MMA_ROWS, depth=HOPPER_COLUMNS)
    return Ring(ring_slots(plan.tokens, plan.slots, left), left, plan.weights, plan.tokens, dtype)
