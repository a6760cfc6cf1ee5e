"""The product of a decode batch with a weight on Hopper, at the speed at which memory gives the weight.

The weight is the left operand: its many rows fill the 64 rows of a wgmma, and the few tokens are its free dimension, so
a block computes [rows of `out`, tokens], which is turned round on its way out. One block runs on each SM. Its memory
warpgroup streams tiles of the weight and of `x` by TMA through a ring of shared memory, and does not stop between one
piece of work and the next; each compute warpgroup multiplies 64 rows. `x` is small and comes from the L2 cache.

Where `out` has too few tiles to fill the chip, `in` is split between blocks, and the float32 parts are added in a fixed
order by whatever comes next. What one token gets depends on no other token.

Operands are bfloat16, or both float8_e4m3fn or int8: then the tokens and the rows of the weight may have scales, by
which a sum is multiplied. The sum of int8 is one of int32, which is exact, and becomes float32 then. A slot of the ring
has as many bytes in every type.

A weight may have more columns, which are kept elsewhere and multiply other numbers of the tokens: their tiles go
through the ring behind its own, into the same sums.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels import gpu_gate
from hex_llm.kernels.activation import Activation
from hex_llm.kernels.chain import MAX_TOKENS, padded
from hex_llm.kernels.hopper import MMA_ROWS, SHARED_BYTES, num_sms
from hex_llm.kernels.matmul.reference import total
from hex_llm.pytree import pytree

TYPES = (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)
LINE_BYTES = 128  # of a row of an operand, which are swizzled together
MAX_SPLITS = 8  # so that what comes next has few parts to add, of which each is as wide as a layer


@dataclass(frozen=True)
class Plan:
    """How a product is cut."""

    rows: int  # of the weight, for one block at a time
    depth: int  # columns of the weight in one slot of the ring
    splits: int = 1  # pieces of `in`, each a piece of work of its own
    slots: int | None = None  # of the ring; as many as fit if not given
    blocks: int | None = None  # at a time; one for each SM if not given


def supports(
    x: Array | jax.ShapeDtypeStruct, weight: Array | jax.ShapeDtypeStruct, *, activation: Activation | None = None
) -> bool:
    """Whether there is a plan for [M, in] x [out, in]."""
    (tokens, size), out = x.shape, weight.shape[0]
    unit = MMA_ROWS if activation is None else 2 * MMA_ROWS
    if activation not in (None, "silu", "gelu") or x.dtype != weight.dtype or x.dtype not in TYPES:
        return False
    return 0 < tokens <= MAX_TOKENS and out > 0 and out % unit == 0 and size > 0 and size % line(x.dtype) == 0


def line(dtype: Any) -> int:
    """Columns of an operand that are swizzled together: a slot of the ring has a multiple of them."""
    return LINE_BYTES // jnp.dtype(dtype).itemsize


def plan_for(
    tokens: int,
    out: int,
    size: int,
    *,
    gated: bool = False,
    dtype: Any = jnp.bfloat16,
    max_splits: int = MAX_SPLITS,
) -> Plan:
    """The plan of a shape and type that `supports` accepts."""
    unit = 2 * MMA_ROWS if gated else MMA_ROWS
    # A block reads all of `x` for each of its tiles: tall ones keep that well below what it reads of the weight. But
    # where they leave SMs without work, low ones are better, and if those are still too few, `in` is split.
    wanted = max(unit, next((rows for rows in (64, 128) if rows >= 2 * tokens), 256))
    if out // wanted < num_sms():
        wanted = unit
    rows = next(rows for rows in (256, 128, 64) if rows <= wanted and out % rows == 0)
    most = 1 if gated else max(1, min(max_splits, num_sms() // (out // rows)))
    # Deep slots are the faster ones, but with many tokens they are too few for a long piece of work.
    deep = size % (2 * line(dtype)) == 0 and rows + tokens <= 192 and (tokens <= 64 or most > 1)
    depth = 2 * line(dtype) if deep else line(dtype)
    splits = max(splits for splits in range(1, most + 1) if size // depth % splits == 0)
    # What a few SMs have more to do than the others they fetch alone, and not at the speed of memory. Then it is better
    # to give fewer SMs, which still keep memory busy, all the same.
    pieces = out // rows * splits
    rounds, left = divmod(pieces, num_sms())
    blocks = -(-pieces // (rounds + 1)) if rounds and 0 < left < num_sms() // 2 else None
    return Plan(rows=rows, depth=depth, splits=splits, blocks=blocks)


def ring_slots(tokens: int, plan: Plan, dtype: Any = jnp.bfloat16) -> int:
    """Slots of the ring of a block: as many as fit, if the plan does not say."""
    return plan.slots or SHARED_BYTES // ((plan.rows + padded(tokens, dtype)) * plan.depth * jnp.dtype(dtype).itemsize)


@pytree
class Scales:
    """By which the sum of a token and a row of the weight is multiplied, both float32."""

    tokens: Array  # [M]
    rows: Array  # [out]


@pytree
class More:
    """More columns of a weight. Its rows are runs, whose columns each multiply other numbers of the tokens."""

    x: Array  # [padded(M), runs * width]
    weights: tuple[Array, ...]  # of each run [rows, width]

    @property
    def width(self) -> int:
        return self.weights[0].shape[1]


@functools.partial(jax.jit, static_argnames=("dtype", "plan", "activation"))
def parts(
    x: Array,
    weight: Array,
    *,
    dtype: jnp.dtype | None = None,
    plan: Plan | None = None,
    activation: Activation | None = None,
    scales: Scales | None = None,
    more: More | None = None,
) -> Array:
    """[M, in] x [out, in] -> [splits, padded(M), out], to be added: in float32, or in `dtype` where there is only one.

    The weight must be there when the program starts, and no result of it: it is read before the kernel in front ends;
    so are the scales of its rows, and the weights of `more`, of which no tile of a plan has rows of two runs. With an
    activation, the weight is [2F, in], the result [1, padded(M), F]: see `reference.gated_matmul`.
    """
    tokens, size = x.shape
    if plan is None:
        plan = plan_for(tokens, weight.shape[0], size, gated=activation is not None, dtype=x.dtype)
    batch = padded(tokens, x.dtype)
    if batch != tokens:
        x = jnp.pad(x, ((0, batch - tokens), (0, 0)))
        if scales is not None:
            scales = Scales(jnp.pad(scales.tokens, (0, batch - tokens)), scales.rows)
    dtype = jnp.dtype(jnp.float32 if plan.splits > 1 else dtype or x.dtype)
    return _call(x, weight, dtype, plan, activation, scales, more)


def matmul(x: Array, weight: Array, *, dtype: jnp.dtype | None = None, plan: Plan | None = None) -> Array:
    """See `reference.matmul`."""
    return total(parts(x, weight, dtype=dtype, plan=plan))[: x.shape[0]].astype(dtype or x.dtype)


def gated_matmul(x: Array, weight: Array, activation: Activation, *, plan: Plan | None = None) -> Array:
    """See `reference.gated_matmul`."""
    return parts(x, weight, plan=plan, activation=activation)[0, : x.shape[0]]


def _call(
    x: Array,
    weight: Array,
    dtype: jnp.dtype,
    plan: Plan,
    activation: Activation | None,
    scales: Scales | None,
    more: More | None,
) -> Array:
    batch, size = x.shape
    operands = 1 if activation is None else 2  # of the weight, for each warpgroup
    out = weight.shape[0] // operands
    workers = plan.rows // MMA_ROWS // operands
    tile_rows = plan.rows // operands  # of the result, for one block at a time
    tiles = out // tile_rows
    steps = size // plan.depth // plan.splits
    assert activation is None or plan.splits == 1, f"{plan} gates parts of sums"
    blocks = min(plan.blocks or num_sms(), tiles * plan.splits)
    more_steps = 0 if more is None else more.width // plan.depth
    with_more = range(operands if more_steps else 0)
    assert more is None or plan.splits == 1 or tiles * plan.splits == blocks, f"{plan} has splits of several lengths"
    most_steps = (steps + operands * more_steps) * -(-tiles * plan.splits // blocks)
    slots = min(ring_slots(batch, plan, x.dtype), most_steps)
    prefetched = min(slots, steps)
    summed = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    tile = (8, line(x.dtype))
    swizzled = plgpu.TilingTransform(tile), plgpu.SwizzleTransform(LINE_BYTES)  # pyright: ignore[reportAbstractUsage]

    def body(x_ref, w_ref, scales_ref, more_ref, o_ref, x_ring, w_ring, token_scales, full, empty, scaled):
        block, worker = lax.axis_index("block"), lax.axis_index("worker")
        pieces = lax.div(tiles * plan.splits - block + blocks - 1, blocks)

        def place(index):
            """(first row of the result, split) of a piece of work."""
            piece = block + index * blocks
            return lax.rem(piece, tiles) * tile_rows, lax.div(piece, tiles)

        # Which steps with more columns a piece has, and how many in all: where `in` is split, blocks have one piece.
        more_first, more_own = _share(more_steps, plan.splits, lax.div(block, tiles))
        length = steps + operands * more_own

        def step_of(index, t):
            return index * length + t

        def with_more_at(half, t):
            return steps + half * more_own + t

        @pl.when(worker == workers)
        def _memory():
            def fetch(index, t, with_weight=True, with_x=True):
                first, split = place(index)
                slot = lax.rem(step_of(index, t), slots)
                columns = pl.ds((split * steps + t) * plan.depth, plan.depth)
                if with_weight:
                    for half in range(operands):
                        source = w_ref.at[pl.ds(first + half * out, tile_rows), columns]
                        target = w_ring.at[slot, pl.ds(half * tile_rows, tile_rows)]
                        plgpu.copy_gmem_to_smem(source, target, full.at[slot])
                if with_x:
                    plgpu.copy_gmem_to_smem(x_ref.at[:, columns], x_ring.at[slot], full.at[slot])

            def fetch_more(index, half, t):
                first, _ = place(index)
                slot = lax.rem(step_of(index, with_more_at(half, t)), slots)
                column = (more_first + t) * plan.depth

                def fetch_run(run, ref, row):
                    # In as many copies as there are of the weight, which is what the barrier counts.
                    rows = tile_rows // operands
                    for i in range(operands):
                        source = ref.at[pl.ds(row + i * rows, rows), pl.ds(column, plan.depth)]
                        target = w_ring.at[slot, pl.ds(half * tile_rows + i * rows, rows)]
                        plgpu.copy_gmem_to_smem(source, target, full.at[slot])
                    source = more_ref.x.at[:, pl.ds(run * more_ref.width + column, plan.depth)]
                    plgpu.copy_gmem_to_smem(source, x_ring.at[slot], full.at[slot])

                row = first + half * out
                for run, ref in enumerate(more_ref.weights):
                    is_here = (row >= 0) & (row < ref.shape[0])
                    pl.when(is_here)(functools.partial(fetch_run, run, ref, row))
                    row = row - ref.shape[0]

            def wait_for_slot(index, t):
                step = step_of(index, t)
                pl.when(step >= slots)(lambda: plgpu.barrier_wait(empty.at[lax.rem(step, slots)]))

            # The weight is there already; `x` is there when the kernel in front has ended.
            pl.loop(0, prefetched)(lambda t: fetch(0, t, with_x=False))
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
            if scales_ref is not None:
                plgpu.copy_gmem_to_smem(scales_ref.tokens, token_scales, scaled)
            pl.loop(0, prefetched)(lambda t: fetch(0, t, with_weight=False))

            @pl.loop(0, pieces)
            def _(index):
                @pl.loop(lax.select(index == 0, prefetched, 0), steps)
                def _(t):
                    wait_for_slot(index, t)
                    fetch(index, t)

                for half in with_more:

                    @pl.loop(0, more_own)
                    def _(t, half=half):
                        wait_for_slot(index, with_more_at(half, t))
                        fetch_more(index, half, t)

            # Nothing is left under way when the block ends.
            @pl.loop(jnp.maximum(pieces * length - slots, 0), pieces * length)
            def _(step):
                plgpu.barrier_wait(empty.at[lax.rem(step, slots)])

        @pl.when(worker < workers)
        def _compute():
            def rows_of(half):
                return pl.ds(half * tile_rows + worker * MMA_ROWS, MMA_ROWS)

            def load_row_scales(index):
                first, _ = place(index)
                for half in range(operands):
                    rows = scales_ref.rows.at[pl.ds(first + half * out + worker * MMA_ROWS, MMA_ROWS)]
                    yield plgpu.load(rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

            if scales_ref is not None:
                plgpu.barrier_wait(scaled)

            @pl.loop(0, pieces)
            def _(index):
                row_scales = [] if scales_ref is None else list(load_row_scales(index))

                def accumulate(*totals):
                    def multiply(t, halves):
                        step = step_of(index, t)
                        slot = lax.rem(step, slots)
                        plgpu.barrier_wait(full.at[slot])
                        for half in halves:
                            right = x_ring.at[slot].transpose((1, 0))
                            plgpu.wgmma(totals[half], w_ring.at[slot, rows_of(half)], right)
                        # The slot before is free once all but this step's products are done.
                        plgpu.wgmma_wait(len(halves))
                        # Not by a branch: that would keep products from running side by side.
                        plgpu.barrier_arrive(empty.at[lax.rem(step + slots - 1, slots)], predicate=t > 0)

                    pl.loop(0, steps)(lambda t: multiply(t, range(operands)))
                    for half in with_more:
                        pl.loop(0, more_own)(lambda t, half=half: multiply(with_more_at(half, t), [half]))
                    return [each[...] for each in totals]

                totals = pl.run_scoped(accumulate, *[plgpu.WGMMAAccumulatorRef((MMA_ROWS, batch), summed)] * operands)
                plgpu.barrier_arrive(empty.at[lax.rem(step_of(index, length) - 1, slots)])
                totals = [each.astype(jnp.float32) for each in totals]
                if scales_ref is not None:
                    columns = plgpu.load(token_scales, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                    totals = [
                        each
                        * lax.broadcast_in_dim(rows, each.shape, [0])
                        * lax.broadcast_in_dim(columns, each.shape, [1])
                        for each, rows in zip(totals, row_scales, strict=True)
                    ]
                result = totals[0] if activation is None else gpu_gate.gated(activation, *totals)
                first, split = place(index)
                # Turned round, each thread has two neighbours of one token, and a warp writes whole sectors.
                turned = plgpu.layout_cast(result.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                o_ref.at[split, :, pl.ds(first + worker * MMA_ROWS, MMA_ROWS)].transpose((1, 0))[...] = turned

    kernel = plgpu.kernel(
        body,
        kernel_name=f"matmul_{weight.shape[0]}x{size}" + ("" if more is None else f"_and_{more.width}"),
        out_type=jax.ShapeDtypeStruct((plan.splits, batch, out), dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=workers + 1,
        thread_name="worker",
        scratch_types=[
            plgpu.SMEM((slots, batch, plan.depth), x.dtype, transforms=swizzled),
            plgpu.SMEM((slots, plan.rows, plan.depth), x.dtype, transforms=swizzled),
            None if scales is None else plgpu.SMEM((batch,), jnp.float32),
            plgpu.Barrier(num_arrivals=operands + 1, num_barriers=slots),
            plgpu.Barrier(num_arrivals=workers, num_barriers=slots),
            None if scales is None else plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(x, weight, scales, more)


def _share(steps: int, splits: int, split: Array) -> tuple[Array | int, Array | int]:
    """(the first, how many) of steps that splits share as evenly as they can."""
    if splits == 1 or not steps:
        return 0, steps
    first = lax.div(split * steps, splits)
    return first, lax.div((split + 1) * steps, splits) - first
