"""Products with weights in few bits on Hopper: at the speed at which memory gives the codes, or the tensor cores' own.

As in `kernels/matmul/gpu.py` the weight is the left operand, tokens are the free dimension, one block runs on each SM,
and its memory warpgroup streams tiles of the weight and of `x` through a ring that does not stop between pieces of
work. But the weight's tiles are codes (`gpu_layout`), which a compute warpgroup takes to its registers, makes bfloat16
of them (`gpu_decode`), and multiplies from there, while it decodes the next ones.

What one token gets depends on no other token.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels import gpu_gate
from hex_llm.kernels.activation import Activation
from hex_llm.kernels.chain import MAX_TOKENS, padded
from hex_llm.kernels.hopper import num_sms
from hex_llm.kernels.matmul.reference import total
from hex_llm.kernels.quant_matmul import gpu_decode
from hex_llm.kernels.quant_matmul.gpu_layout import CHUNK, CHUNKS, LINE, chunk_lines, grouping_of
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, HOPPER_ROWS, Packed, bits

SWIZZLED = (plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
SHARED_BYTES = 222 * 1024  # for the ring: of 227 KB, so that a small kernel can stand beside
MAX_SPLITS = 8
# Of the memory warpgroup and of those that compute, by how many the latter are: together at most what the launch took,
# or it hangs.
REGISTERS = {2: (40, 232), 3: (24, 160), 4: (24, 112)}


@dataclass(frozen=True)
class Plan:
    """How a product is cut."""

    workers: int  # warpgroups that multiply
    stack: int = 1  # tiles of 64 rows that each of them multiplies side by side
    tokens: int | None = None  # of a piece of work; all if not given
    splits: int = 1  # pieces of `in`, each a piece of work of its own
    band: int = 8  # pieces of tokens that run side by side
    slots: int | None = None  # of the ring; as many as fit if not given
    blocks: int | None = None  # at a time; one for each SM if not given

    @property
    def rows(self) -> int:
        """Of the weight, for one block at a time."""
        return self.workers * self.stack * HOPPER_ROWS


def supports(x: Array, weight: Packed, *, activation: Activation | None = None) -> bool:
    """Whether `parts` takes [M, in] x [out, in]."""
    unit = HOPPER_ROWS if activation is None else 2 * HOPPER_ROWS
    known = activation in (None, "silu", "gelu") and x.dtype == jnp.bfloat16
    is_one = weight.layout == "hopper" and weight.data.ndim == 4
    return known and is_one and 0 < x.shape[0] <= MAX_TOKENS and weight.shape[0] % unit == 0


def plan_for(tokens: int, out: int, size: int, *, gated: bool = False) -> Plan:
    """The plan of a shape that `supports` accepts."""
    stack = 2 if gated else 1
    tiles = out // HOPPER_ROWS // stack
    workers = next(workers for workers in (4, 2, 1) if tiles % workers == 0)
    return Plan(workers=workers, stack=stack)


def ring_slots(tokens: int, weight: Packed, plan: Plan) -> int:
    """Slots of the ring of a block: as many as fit, if the plan does not say."""
    grouping = grouping_of(weight)
    words = 0 if grouping is None else grouping.words
    row = HOPPER_COLUMNS * bits(weight.coding) // 8 + 4 * words
    return plan.slots or SHARED_BYTES // (plan.rows * row + (plan.tokens or padded(tokens)) * HOPPER_COLUMNS * 2)


@functools.partial(jax.jit, static_argnames=("dtype", "plan", "activation"))
def parts(
    x: Array,
    weight: Packed,
    *,
    dtype: jnp.dtype | None = None,
    plan: Plan | None = None,
    activation: Activation | None = None,
) -> Array:
    """As `kernels.matmul.gpu.parts`: [splits, padded(M), out], to be added; with an activation [1, padded(M), F]."""
    tokens, size = x.shape
    if plan is None:
        plan = plan_for(tokens, weight.shape[0], size, gated=activation is not None)
    if weight.order is not None:
        x = x[:, weight.order]
    batch = padded(tokens)
    if batch != tokens:
        x = jnp.pad(x, ((0, batch - tokens), (0, 0)))
    dtype = jnp.dtype(jnp.float32 if plan.splits > 1 else dtype or x.dtype)
    return _call(x, weight, dtype, plan, activation)


def matmul(x: Array, weight: Packed, *, dtype: jnp.dtype | None = None, plan: Plan | None = None) -> Array:
    """See `reference.matmul`."""
    return total(parts(x, weight, dtype=dtype, plan=plan))[: x.shape[0]].astype(dtype or x.dtype)


def gated_matmul(x: Array, weight: Packed, activation: Activation, *, plan: Plan | None = None) -> Array:
    """See `reference.gated_matmul`."""
    return parts(x, weight, plan=plan, activation=activation)[0, : x.shape[0]]


def _call(x: Array, weight: Packed, dtype: jnp.dtype, plan: Plan, activation: Activation | None) -> Array:
    coding, grouping = weight.coding, grouping_of(weight)
    batch = x.shape[0]
    row_tiles, column_tiles, lines, _ = weight.data.shape
    workers, stack = plan.workers, plan.stack
    # The i-th tile of a warpgroup is so far below its first; a tile of up has the number of its gate's in its half.
    apart = workers if activation is None else row_tiles // 2
    results = stack if activation is None else 1  # tiles of the result, for each warpgroup
    pieces_of_weight = 1 if activation is None else 2  # that a block fetches, one below the other in its ring
    tall = workers * stack // pieces_of_weight
    across, down = batch // (plan.tokens or batch), row_tiles // (workers * stack)
    tokens = batch // across
    steps = column_tiles // plan.splits
    total_pieces = down * across * plan.splits
    blocks = min(plan.blocks or num_sms(), total_pieces)
    slots = min(ring_slots(batch, weight, plan), steps * -(-total_pieces // blocks))
    prefetched = min(slots, steps)
    band = min(plan.band, across)
    copies = pieces_of_weight * (1 if grouping is None else 2)  # of the weight, to a slot

    def body(x_ref, w_ref, scale_ref, o_ref, x_ring, w_ring, scale_ring, full, empty):
        block, worker = lax.axis_index("block"), lax.axis_index("worker")
        pieces = lax.div(total_pieces - block + blocks - 1, blocks)

        def place(index):
            """(first tile of rows, first token, split) of a piece of work: along the tokens of a band, then down."""
            piece = block + index * blocks
            if across == 1:
                return lax.rem(piece, down) * tall, 0, lax.div(piece, down)
            which = lax.div(piece, band * down)
            left = piece - which * (band * down)
            width = jnp.minimum(band, across - which * band)
            column = which * band + lax.rem(left, width)
            return lax.div(left, width) * tall, column * tokens, 0

        @pl.when(worker == workers)
        def _memory():
            if workers in REGISTERS:
                plgpu.set_max_registers(REGISTERS[workers][0], action="decrease")

            def fetch(index, t, with_weight=True, with_x=True):
                first, token, split = place(index)
                slot = lax.rem(index * steps + t, slots)
                column = split * steps + t
                if with_weight:
                    for i in range(pieces_of_weight):
                        source, target = pl.ds(first + i * apart, tall), pl.ds(i * tall, tall)
                        plgpu.copy_gmem_to_smem(w_ref.at[source, column], w_ring.at[slot, target], full.at[slot])
                        if grouping is not None:
                            plgpu.copy_gmem_to_smem(
                                scale_ref.at[source, column], scale_ring.at[slot, target], full.at[slot]
                            )
                if with_x:
                    columns = pl.ds(column * HOPPER_COLUMNS, HOPPER_COLUMNS)
                    plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(token, tokens), columns], x_ring.at[slot], full.at[slot])

            # The weight is there already; `x` is there when the kernel in front has ended.
            pl.loop(0, prefetched)(lambda t: fetch(0, t, with_x=False))
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
            pl.loop(0, prefetched)(lambda t: fetch(0, t, with_weight=False))

            @pl.loop(0, pieces)
            def _(index):
                @pl.loop(lax.select(index == 0, prefetched, 0), steps)
                def _(t):
                    step = index * steps + t
                    pl.when(step >= slots)(lambda: plgpu.barrier_wait(empty.at[lax.rem(step, slots)]))
                    fetch(index, t)

            # Nothing is left under way when the block ends.
            @pl.loop(jnp.maximum(pieces * steps - slots, 0), pieces * steps)
            def _(step):
                plgpu.barrier_wait(empty.at[lax.rem(step, slots)])

        @pl.when(worker < workers)
        def _compute():
            if workers in REGISTERS:
                plgpu.set_max_registers(REGISTERS[workers][1], action="increase")

            def operand(slot, tile, chunk):
                """A chunk's numbers, in registers."""
                count = chunk_lines(coding)
                codes = plgpu.load(
                    w_ring.at[slot, tile, pl.ds(chunk * count, count)], layout=gpu_decode.word_layout(coding)
                )
                scales = (
                    ()
                    if grouping is None
                    else tuple(
                        plgpu.load(scale_ring.at[slot, tile, word], layout=gpu_decode.ROW_LAYOUT, optimized=False)
                        for word in gpu_decode.words_of(grouping, chunk)
                    )
                )
                return gpu_decode.decode(codes, scales, coding, grouping, chunk)

            @pl.loop(0, pieces)
            def _(index):
                def accumulate(*totals):
                    @pl.loop(0, steps)
                    def _(t):
                        step = index * steps + t
                        slot = lax.rem(step, slots)
                        plgpu.barrier_wait(full.at[slot])
                        for chunk in range(CHUNKS):
                            right = x_ring.at[slot, :, pl.ds(chunk * CHUNK, CHUNK)].transpose((1, 0))
                            for i, accumulator in enumerate(totals):
                                plgpu.wgmma(accumulator, operand(slot, i * workers + worker, chunk), right)
                                # The registers of the product before are free, and at first the slot before.
                                plgpu.wgmma_wait(1)
                                if chunk == i == 0:
                                    pl.when(t > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(step - 1, slots)]))

                    return [each[...] for each in totals]

                totals = pl.run_scoped(
                    accumulate, *[plgpu.WGMMAAccumulatorRef((HOPPER_ROWS, tokens), jnp.float32)] * stack
                )
                plgpu.barrier_arrive(empty.at[lax.rem(index * steps + steps - 1, slots)])
                first, token, split = place(index)
                rows = [pl.ds((first + i * apart + worker) * HOPPER_ROWS, HOPPER_ROWS) for i in range(stack)]
                if grouping is None:
                    totals = [_scaled(each, scale_ref.at[rows[i]]) for i, each in enumerate(totals)]
                if activation is not None:
                    totals = [gpu_gate.gated(activation, *totals)]
                for i, result in enumerate(totals):
                    # Turned round, each thread has two neighbours of one token, and a warp writes whole sectors.
                    turned = plgpu.layout_cast(result.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                    o_ref.at[split, pl.ds(token, tokens), rows[i]].transpose((1, 0))[...] = turned

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.splits, batch, row_tiles // stack * results * HOPPER_ROWS), dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=workers + 1,
        thread_name="worker",
        scratch_types=[
            plgpu.SMEM((slots, tokens, HOPPER_COLUMNS), x.dtype, transforms=SWIZZLED),
            plgpu.SMEM((slots, workers * stack, lines, LINE), jnp.int32),
            None if grouping is None else plgpu.SMEM((slots, workers * stack, grouping.words, HOPPER_ROWS), jnp.int32),
            plgpu.Barrier(num_arrivals=copies + 1, num_barriers=slots),
            plgpu.Barrier(num_arrivals=workers, num_barriers=slots),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    scale = weight.scale.reshape(-1) if grouping is None else weight.scale
    return kernel(x, weight.data, scale)


def _scaled(sums, scale_ref):
    scale = plgpu.load(scale_ref, layout=gpu_decode.ROW_LAYOUT, optimized=False)
    return sums * lax.broadcast_in_dim(scale, sums.shape, [0])
