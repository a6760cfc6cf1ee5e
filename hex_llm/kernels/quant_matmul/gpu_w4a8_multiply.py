"""What a warpgroup on Hopper does with slots of 4-bit codes and tokens in 8 bits: it multiplies by the codes as they
are, and its float32 sums of a tile, which is one group, by their scales.

What zeros take away is subtracted for several tiles at once (`gpu_w4a8_zeros`).
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from hex_llm.kernels.quant_matmul import gpu_w4a8_decode, gpu_w4a8_zeros
from hex_llm.kernels.quant_matmul.gpu_layout import THREADS
from hex_llm.kernels.quant_matmul.gpu_ring import Ring, Run, Share
from hex_llm.kernels.quant_matmul.gpu_w4a8_layout import SMALLER, scale_and_zero
from hex_llm.kernels.quant_matmul.gpu_w4a8_zeros import Zeros
from hex_llm.kernels.quant_matmul.rows import TILES
from hex_llm.kernels.quant_matmul.weight import HOPPER_ROWS

MOST_SUMS = 160  # registers of a thread that hold sums, of tiles and of the products that run: more find no place
ROWS = plgpu.Layout.WGMMA.reduce(1)


@dataclass(frozen=True)
class Narrow:
    """With tokens in float8_e4m3fn."""

    tokens: int
    zeros: Zeros

    def accumulate(self, ring: Ring, share: Share, run: Run, slot: Array) -> tuple[list[Array], Array]:
        """The sums [64, tokens] of each tile of a share, through a run of them from the slot on, and the next slot."""
        shape = (HOPPER_ROWS, self.tokens)
        sums_each = HOPPER_ROWS * self.tokens // THREADS
        # Products that run at a time, and slots that they are of. A warpgroup that is alone has one of each, and so few
        # registers that it can begin beside the kernel in front.
        is_two = max(share.stack, share.workers) == 2 and (share.stack + 2) * sums_each <= MOST_SUMS
        together = 2 if is_two else 1
        abreast = max(1, together // share.stack)
        # Codes of the next slot are loaded meanwhile, where there are registers for them.
        ahead = together == share.stack

        def along(rows: Array) -> Array:
            return lax.broadcast_in_dim(rows, shape, [0])

        def load(slot: Array) -> tuple[Array, ...]:
            plgpu.barrier_wait(ring.full.at[slot])
            return tuple(_codes(ring, slot, share.tile(i)) for i in range(share.stack) if ahead)

        def multiply_all(*sums: Any) -> Any:
            def multiply(column: Array, slots: list[Array], totals: Any, loaded: Any, after: Array | None) -> Any:
                """Adds the products of slots, and loads the one after them, if that is given."""
                totals, loaded_after = list(totals), loaded
                all_products = itertools.product(range(len(slots)), range(share.stack))
                for products in itertools.batched(all_products, together):
                    # All at once: there is one wait for shared memory then.
                    codes = [loaded[i] if ahead else _codes(ring, slots[j], share.tile(i)) for j, i in products]
                    of_rows = [scale_and_zero(_words(ring, slots[j], share.tile(i))) for j, i in products]
                    numbers = [gpu_w4a8_decode.decode(each) for each in codes]
                    own_sums = sums[: len(products)]
                    for each in own_sums:
                        each[...] = blank(shape)
                    for each, left, (j, _) in zip(own_sums, numbers, products, strict=True):
                        plgpu.wgmma(each, left, ring.x.at[slots[j]].transpose((1, 0)))
                    if ahead and after is not None:
                        loaded_after = load(after)
                    for (j, i), (scale, zero) in zip(products, of_rows, strict=True):
                        place = self.zeros.of_rows.at[share.tile(i), lax.rem(column + j, TILES)]
                        place[...] = zero * scale * (1 / SMALLER)
                    for begun, ((j, i), each, (scale, _)) in enumerate(zip(products, own_sums, of_rows, strict=True)):
                        found = _result(each, len(products) - 1 - begun)
                        if i == share.stack - 1:
                            plgpu.barrier_arrive(ring.empty.at[slots[j]])
                        totals[i] += found * along(scale)
                return tuple(totals), loaded_after

            def tiles(_: Array, carry: Any) -> Any:
                """Those whose zeros are subtracted at a time."""
                column, slot, totals = carry
                first = lax.rem(column, TILES)
                count = jnp.minimum(TILES - first, run.first + run.length - column)
                after, totals = (multiply_slots if abreast == 1 else multiply_pairs)(column, count, slot, totals)
                return column + count, after, subtract(list(totals), first, count)

            def multiply_slots(column: Array, count: Array, slot: Array, totals: Any) -> Any:
                def next_one(i: Array, carry: Any) -> Any:
                    slot, totals, loaded = carry
                    after = ring.after(slot)
                    totals, loaded = multiply(column + i, [slot], totals, loaded, after)
                    if not ahead:
                        load(after)
                    return after, totals, loaded

                last, totals, loaded = lax.fori_loop(0, count - 1, next_one, (slot, totals, load(slot)))
                return ring.after(last), multiply(column + count - 1, [last], totals, loaded, None)[0]

            def multiply_pairs(column: Array, count: Array, slot: Array, totals: Any) -> Any:
                """And one that is left."""

                def some(number: int, begin: Array, i: Array, carry: Any) -> Any:
                    slot, totals = carry
                    slots = [slot]
                    while len(slots) < number:
                        slots.append(ring.after(slots[-1]))
                    for each in slots:
                        plgpu.barrier_wait(ring.full.at[each])
                    totals, _ = multiply(begin + number * i, slots, totals, (), None)
                    return ring.after(slots[-1]), totals

                left = lax.rem(count, 2)
                carry = lax.fori_loop(0, lax.div(count, 2), functools.partial(some, 2, column), (slot, totals))
                return lax.fori_loop(0, left, functools.partial(some, 1, column + count - left), carry)

            def subtract(totals: list[Array], first: Array, count: Array) -> tuple[Array, ...]:
                gpu_w4a8_zeros.await_own_warp(self.zeros.of_rows)
                plgpu.barrier_wait(self.zeros.there)
                for some in itertools.batched(range(share.stack), together):
                    found = _taken_away(sums[: len(some)], self.zeros, [share.tile(i) for i in some], first, count)
                    for i, each in zip(some, found, strict=True):
                        totals[i] -= each
                plgpu.barrier_arrive(self.zeros.free)
                return tuple(totals)

            turns = lax.div(run.first + run.length - 1, TILES) - lax.div(run.first, TILES) + 1
            begin = run.first, slot, tuple(blank(shape) for _ in range(share.stack))
            _, end, totals = lax.fori_loop(0, turns, tiles, begin)
            return list(totals), end

        return pl.run_scoped(multiply_all, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * together)


def _taken_away(sums: Sequence[Any], zeros: Zeros, tiles: list[Any], first: Array, count: Array) -> list[Array]:
    """By zeros, from each of some tiles of a slot, in so many slots."""
    parts = [gpu_w4a8_zeros.parts_of_rows(zeros, tile, first, count) for tile in tiles]
    for each in sums:
        each[...] = blank(each.shape)
    for each, (high, low) in zip(sums, parts, strict=True):
        for left, right in ((high, 0), (high, 1), (low, 0)):
            plgpu.wgmma(each, left, zeros.of_tokens.at[right].transpose((1, 0)))
    return [_result(each, 3 * (len(sums) - 1 - begun)) for begun, each in enumerate(sums)]


def _result(sums: Any, running: int) -> Array:
    """Of a product after which so many were begun."""
    # Without the barrier, the compiler may read it before the wait.
    return lax.optimization_barrier(plgpu.wgmma_accumulator_load(sums, wait_n=running))


def blank(shape: tuple[int, int]) -> Array:
    """Each from an instruction of its own, as ptxas wants them: then products begin without them. To LLVM zeros are one
    register, of which it makes copies, for which ptxas may even wait until a product has ended."""

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA))
    def made(_: Any) -> Any:
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        for at in np.ndindex(registers.shape):
            both = [llvm.inline_asm(f32, [], "mov.f32 $0, 0f00000000;", "=f", has_side_effects=True) for _ in range(2)]
            registers[at] = vector.from_elements(pair, both)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return made()  # pyright: ignore[reportCallIssue]


def _codes(ring: Ring, slot: Array, tile: Any) -> Array:
    return plgpu.load(ring.codes.at[slot, tile], layout=gpu_w4a8_decode.WORDS)


def _words(ring: Ring, slot: Array, tile: Any) -> Array:
    """With the scale and the zero of each row."""
    return plgpu.load(ring.scale.at[slot, tile, 0], layout=ROWS, optimized=False)
