"""Products with weights in few bits on Hopper: at the speed at which memory gives the codes, or the tensor cores' own.

As in `kernels/matmul/gpu.py` the weight is the left operand, tokens are the free dimension, one block runs on each SM,
and its memory warpgroup streams tiles of the weight and of `x` through a ring that does not stop between pieces of
work. But the weight's tiles are codes (`gpu_layout`), which a compute warpgroup takes to its registers, makes bfloat16
numbers of them (`gpu_decode`), and multiplies from there; while a product runs, it decodes what the next one needs.
With tokens in 8 bits, codes of 4 bits are multiplied as they are (`gpu_w4a8_multiply`).

Up to 128 tokens are one piece of work with a tile of rows, and `in` may be split between blocks. With more, tokens are
cut, too, and the same kernel runs at nearly the speed of a product in bfloat16: to write the whole weight in bfloat16
first, for cuBLAS, takes longer than what that lacks. What one token gets depends on no other token.

Where the pieces are no multiple of the blocks, all blocks can have an equal share of those that are left (`Plan.even`):
who has the first part of one hands its sums to who has the next.
"""

import functools

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
from hex_llm.kernels.quant_matmul import gpu_decode, gpu_handover, gpu_w4a8_zeros
from hex_llm.kernels.quant_matmul.gpu_layout import LINE, grouping_of
from hex_llm.kernels.quant_matmul.gpu_multiply import Wide
from hex_llm.kernels.quant_matmul.gpu_plan import Plan, pace_of, plan_for, plan_for_many, ring_slots
from hex_llm.kernels.quant_matmul.gpu_ring import Ring, Run, Share
from hex_llm.kernels.quant_matmul.gpu_w4a8_multiply import Narrow
from hex_llm.kernels.quant_matmul.gpu_w4a8_tokens import Known, narrow
from hex_llm.kernels.quant_matmul.gpu_w4a8_zeros import Zeros
from hex_llm.kernels.quant_matmul.rows import TILES, Rows, Tokens
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, HOPPER_ROWS, Packed

LINE_BYTES = 128  # of a token's numbers, which are swizzled together
PREFETCHED = 4  # slots of the weight that are asked for before `x` is: to ask takes time, too
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # of two that compute: together at most what the launch took, or it hangs


def supports(x: Tokens, weight: Packed, *, activation: Activation | None = None) -> bool:
    """Whether `parts` takes [M, in] x [out, in]."""
    unit = HOPPER_ROWS if activation is None else 2 * HOPPER_ROWS
    known = activation in (None, "silu", "gelu") and x.dtype == jnp.bfloat16
    is_one = weight.layout in ("hopper", "hopper8") and weight.data.ndim == 4
    return known and is_one and 0 < x.shape[0] <= MAX_TOKENS and weight.shape[0] % unit == 0


@functools.partial(jax.jit, static_argnames=("dtype", "plan", "activation"))
def parts(
    x: Tokens,
    weight: Packed,
    *,
    dtype: jnp.dtype | None = None,
    plan: Plan | None = None,
    activation: Activation | None = None,
) -> Array:
    """As `kernels.matmul.gpu.parts`: [splits, padded(M), out], to be added; with an activation [1, padded(M), F]."""
    tokens = x.shape[0]
    if plan is None:
        # Of the weight's own sizes: where it has an order, `x` may have more columns.
        plan = plan_for(tokens, *weight.shape, pace=pace_of(weight), gated=activation is not None)
    dtype = jnp.dtype(jnp.float32 if plan.splits > 1 else dtype or x.dtype)
    return _call(*_lying(x, weight, padded(tokens)), weight, dtype, plan, activation)


def matmul(x: Tokens, weight: Packed, *, dtype: jnp.dtype | None = None, plan: Plan | None = None) -> Array:
    """See `reference.matmul`."""
    dtype = jnp.dtype(dtype or x.dtype)
    if x.shape[0] <= MAX_TOKENS:
        return total(parts(x, weight, dtype=dtype, plan=plan))[: x.shape[0]].astype(dtype)
    return _many(x, weight, dtype, plan or plan_for_many(x.shape[0], *weight.shape, pace=pace_of(weight)))


@functools.partial(jax.jit, static_argnames=("dtype", "plan"))
def _many(x: Tokens, weight: Packed, dtype: jnp.dtype, plan: Plan) -> Array:
    tokens = x.shape[0]
    width = plan.tokens or padded(tokens)
    return _call(*_lying(x, weight, -(-tokens // width) * width), weight, dtype, plan, None)[0, :tokens]


def gated_matmul(x: Tokens, weight: Packed, activation: Activation, *, plan: Plan | None = None) -> Array:
    """See `reference.gated_matmul`."""
    return parts(x, weight, plan=plan, activation=activation)[0, : x.shape[0]]


def _lying(x: Tokens, weight: Packed, count: int) -> tuple[Array, Known | None]:
    """[count, in], of which those past the tokens are zeros, as the weight multiplies them, and what it has to know."""
    if weight.layout == "hopper8":
        return narrow(x, weight, count)
    assert not isinstance(x, Rows), "tokens in 8 bits are for weights that take those"
    if weight.order is not None:
        x = x[:, weight.order]
    return jnp.pad(x, ((0, count - x.shape[0]), (0, 0))) if count > x.shape[0] else x, None


def _call(
    x: Array, known: Known | None, weight: Packed, dtype: jnp.dtype, plan: Plan, activation: Activation | None
) -> Array:
    """[splits, M, out], or gated [1, M, F]: of tokens [M, in] which the plan cuts without a rest."""
    coding, grouping = weight.coding, grouping_of(weight)
    batch = x.shape[0]
    row_tiles, column_tiles, lines, _ = weight.data.shape
    workers, stack = plan.workers, plan.stack
    # The i-th tile of a warpgroup is so far below its first; a tile of up has the number of its gate's in its half.
    apart = workers if activation is None else row_tiles // 2
    pieces_of_weight = 1 if activation is None else 2  # that a block fetches, one below the other in its ring
    tall = workers * stack // pieces_of_weight
    across, down = batch // (plan.tokens or batch), row_tiles // (workers * stack)
    tokens = batch // across
    cuts = HOPPER_COLUMNS // plan.depth  # of a tile
    assert x.shape[1] == weight.shape[1], f"{x.shape[1]} columns of x for {weight.shape[1]} of the weight"
    assert activation is None or (stack == 2 and plan.splits == 1), f"{plan} gates parts of sums, or without an up"
    assert known is None or plan.depth == HOPPER_COLUMNS, f"{plan} cuts tiles, whose sums of tokens are of all"
    assert column_tiles % plan.splits == 0, f"{plan} does not cut {column_tiles} tiles"
    length = column_tiles // plan.splits  # tiles of a piece of work
    words = 0 if grouping is None else max(1, grouping.words // cuts)  # in a slot
    pieces = down * across * plan.splits
    blocks = plan.blocks or (num_sms() if plan.even else -(-pieces // -(-pieces // num_sms())))
    blocks = min(blocks, pieces * length if plan.even else pieces)
    # Every block has so many pieces to itself. Those that are left are a line of tiles, of which each has a share, if
    # that is at least one and never as long as a piece; or they are dealt out like the others.
    rounds, left = divmod(pieces, blocks)
    line = left * length if plan.even and blocks <= left * length <= blocks * (length - 1) else 0
    slots = min(ring_slots(batch, weight, plan), cuts * (length * -(-pieces // blocks)))
    fewest = cuts * (rounds * length + line // blocks)  # slots that each block fills
    prefetched = min(slots, fewest, PREFETCHED)
    band = min(plan.band, across)
    copies = pieces_of_weight * (1 if grouping is None else 2)  # of the weight, to a slot
    tiled = plgpu.TilingTransform((8, LINE_BYTES // x.dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
    swizzled = tiled, plgpu.SwizzleTransform(LINE_BYTES)  # pyright: ignore[reportAbstractUsage]

    def body(
        x_ref, known_ref, w_ref, scale_ref, word_ref, o_ref, part_ref,
        x_ring, w_ring, scale_ring, full, empty, *for_zeros,
    ):  # fmt: skip
        block, worker = lax.axis_index("block"), lax.axis_index("worker")
        own = rounds if line else lax.div(pieces - block + blocks - 1, blocks)
        start, end = (lax.div(each * line, blocks) for each in (block, block + 1))
        count = own * length + end - start

        ring, zeros = Ring(slots, x_ring, w_ring, scale_ring, full, empty), Zeros(*for_zeros) if for_zeros else None
        inner = Wide(coding, grouping, tokens, plan.depth) if zeros is None else Narrow(tokens, zeros)

        def tile_of(index):
            """(piece, tile in it, whether it ends a run of them) of a block's tiles: those of its own pieces, then its
            share, from the last piece of that."""
            turn = lax.div(index, length)
            own_place = block + turn * blocks, index - turn * length, index - turn * length == length - 1
            if not line:
                return own_place
            piece = lax.div(end - 1 - (index - own * length), length)
            low, high = shared(piece)
            tile = low + index - own * length - (end - (piece * length + high))
            shared_place = rounds * blocks + piece, tile, tile == high - 1
            is_own = index < own * length
            return tuple(lax.select(is_own, *each) for each in zip(own_place, shared_place, strict=True))

        def shared(piece):
            """The tiles that a block has of one that is shared."""
            before = piece * length
            return jnp.maximum(start, before) - before, jnp.minimum(end, before + length) - before

        def place(piece):
            """(first tile of rows, first token, split) of a piece of work: along the tokens of a band, then down."""
            if across == 1:
                return lax.rem(piece, down) * tall, 0, lax.div(piece, down)
            which = lax.div(piece, band * down)
            rest = piece - which * (band * down)
            high = jnp.minimum(band, across - which * band)
            return lax.div(rest, high) * tall, (which * band + lax.rem(rest, high)) * tokens, 0

        @pl.when(worker == workers)
        def _memory():
            if workers == 2:
                plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

            def fetch(index, slot, with_weight=True, with_x=True):
                tile, cut = (index, 0) if cuts == 1 else (lax.div(index, cuts), lax.rem(index, cuts))
                piece, tile, is_last = tile_of(tile)
                first, token, split = place(piece)
                column = split * length + tile
                if with_weight:
                    codes = pl.ds(cut * (lines // cuts), lines // cuts)
                    scales = pl.ds(0 if grouping is None or grouping.words == 1 else cut * words, words)
                    for i in range(pieces_of_weight):
                        source, target = pl.ds(first + i * apart, tall), pl.ds(i * tall, tall)
                        plgpu.copy_gmem_to_smem(w_ref.at[source, column, codes], w_ring.at[slot, target], full.at[slot])
                        if grouping is not None:
                            plgpu.copy_gmem_to_smem(
                                scale_ref.at[source, column, scales], scale_ring.at[slot, target], full.at[slot]
                            )
                if with_x:
                    columns = pl.ds((column * cuts + cut) * plan.depth, plan.depth)
                    plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(token, tokens), columns], x_ring.at[slot], full.at[slot])
                    if zeros is not None:
                        pl.when(is_last | (lax.rem(column, TILES) == TILES - 1))(lambda: fetch_sums(token, column))

            def fetch_sums(token, column):
                """Of tiles up to that of a column, when they have all been fetched. There is one place for them,
                and nothing is fetched until those before have been subtracted."""
                assert zeros is not None
                plgpu.barrier_wait(zeros.free)
                tiles = pl.ds(pl.multiple_of(column - lax.rem(column, TILES), TILES), TILES)
                for i in range(2):
                    source = known_ref.sums.at[i, pl.ds(token, tokens), tiles]
                    plgpu.copy_gmem_to_smem(source, zeros.of_tokens.at[i], zeros.there)

            # The weight is there already; `x` is there when the kernel in front has ended.
            pl.loop(0, prefetched)(lambda t: fetch(t, t, with_x=False))
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
            pl.loop(0, prefetched)(lambda t: fetch(t, t, with_weight=False))

            def fetch_next(index, slot):
                pl.when(index >= slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
                fetch(index, slot)
                return ring.after(slot)

            slot = lax.fori_loop(prefetched, cuts * count, fetch_next, jnp.int32(prefetched % slots))

            # Nothing is left under way when the block ends.
            def wait_for(_, slot):
                plgpu.barrier_wait(empty.at[slot])
                return ring.after(slot)

            # The oldest that is still in use; where the ring was never full, that is the first.
            in_use = jnp.minimum(cuts * count, slots)
            lax.fori_loop(0, in_use, wait_for, lax.select(in_use == slots, slot, 0))
            if zeros is not None:
                plgpu.barrier_wait(zeros.free)

        @pl.when(worker < workers)
        def _compute():
            if workers == 2:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            share = Share(worker, workers, stack)
            if zeros is not None:
                plgpu.barrier_arrive(zeros.free)

            def write(results, split, token, rows):
                for own_rows, result in zip(rows, results, strict=True):
                    # Turned round, each thread has two neighbours of one token, and a warp writes whole sectors.
                    turned = plgpu.layout_cast(result.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                    o_ref.at[split, pl.ds(token, tokens), own_rows].transpose((1, 0))[...] = turned

            def finish(piece, totals):
                first, token, split = place(piece)
                rows = [pl.ds((first + i * apart + worker) * HOPPER_ROWS, HOPPER_ROWS) for i in range(stack)]
                if grouping is None:
                    totals = [_scaled(each, scale_ref.at[rows[i]]) for i, each in enumerate(totals)]
                if known_ref is not None:
                    plgpu.griddepcontrol_wait()
                    totals = [_of_tokens(each, known_ref.scale.at[pl.ds(token, tokens)]) for each in totals]
                if activation is not None:
                    totals, rows = [gpu_gate.gated(activation, *totals)], rows[:1]
                write(totals, split, token, rows)

            def accumulate(piece, tile, count, slot):
                first = place(piece)[2] * length + tile
                return inner.accumulate(ring, share, Run(first, count), slot)

            def own_piece(index, slot):
                piece = block + index * blocks
                totals, slot = accumulate(piece, 0, length, slot)
                finish(piece, totals)
                return slot

            def left_by(of):
                """What the same warpgroup of a block leaves of a piece, and the word of it."""
                return part_ref.at[of, worker], word_ref.at[pl.ds(of * workers + worker, 1)]

            def shared_piece(index, slot):
                """From the last one of its share, whose end another block has, to the first, whose end is its own. No
                share has all of a piece: sums go from block to block, and who has the end of a piece has them all."""
                piece = lax.div(end - 1, length) - index
                low, high = shared(piece)
                sums, slot = accumulate(rounds * blocks + piece, low, high - low, slot)
                has_start, has_end = low == 0, high == length

                def so_far():
                    return gpu_handover.add(*left_by(block - 1), sums)

                pl.when(has_start)(lambda: gpu_handover.leave(*left_by(block), sums))
                pl.when(~has_start & ~has_end)(lambda: gpu_handover.leave(*left_by(block), so_far()))
                pl.when(has_end)(lambda: finish(rounds * blocks + piece, so_far()))
                return slot

            slot = lax.fori_loop(0, own, own_piece, jnp.int32(0))
            if line:
                lax.fori_loop(0, lax.div(end - 1, length) - lax.div(start, length) + 1, shared_piece, slot)

    kernel = plgpu.kernel(
        body,
        kernel_name=f"matmul_{coding}_{weight.shape[0]}x{weight.shape[1]}",
        out_type=[
            jax.ShapeDtypeStruct((plan.splits, batch, row_tiles // pieces_of_weight * HOPPER_ROWS), dtype),
            jax.ShapeDtypeStruct((blocks, workers, stack, HOPPER_ROWS, tokens), jnp.float32) if line else None,
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=workers + 1,
        thread_name="worker",
        scratch_types=[
            plgpu.SMEM((slots, tokens, plan.depth), x.dtype, transforms=swizzled),
            plgpu.SMEM((slots, workers * stack, lines // cuts, LINE), jnp.int32),
            None if grouping is None else plgpu.SMEM((slots, workers * stack, words, HOPPER_ROWS), jnp.int32),
            plgpu.Barrier(num_arrivals=copies + 1, num_barriers=slots),
            plgpu.Barrier(num_arrivals=workers, num_barriers=slots),
            *([] if known is None else gpu_w4a8_zeros.scratch(workers, stack, tokens)),
        ],
        # Mosaic has all warps wait at every copy and store; the ring and what is shared have barriers of their own. So
        # only tokens in 8 bits have run on a card.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=known is not None),
    )
    scale = weight.scale.reshape(-1) if grouping is None else weight.scale
    return kernel(x, known, weight.data, scale, gpu_handover.words(blocks * workers) if line else None)[0]


def _scaled(sums, scale_ref):
    scale = plgpu.load(scale_ref, layout=gpu_decode.ROW_LAYOUT, optimized=False)
    return sums * lax.broadcast_in_dim(scale, sums.shape, [0])


def _of_tokens(sums, scale_ref):
    scale = plgpu.load(scale_ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return sums * lax.broadcast_in_dim(scale, sums.shape, [1])
