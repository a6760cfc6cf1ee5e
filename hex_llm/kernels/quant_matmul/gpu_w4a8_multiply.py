"""What a warpgroup on Hopper does with slots of 4-bit codes and tokens in 8 bits: it multiplies by the codes as they
are, and its float32 sums of a tile, which is one group, by their scales.

While products run, what the zeros take away is added: as much of the sum of a token's numbers. In the tensor cores,
whose sums have fewer bits than float32, it would cost more of them, and time before a product.
"""

import itertools
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

from hex_llm.kernels.quant_matmul import gpu_w4a8_decode
from hex_llm.kernels.quant_matmul.gpu_ring import Ring, Share
from hex_llm.kernels.quant_matmul.gpu_w4a8_layout import SMALLER, scale_and_zero
from hex_llm.kernels.quant_matmul.weight import HOPPER_ROWS

FEW_TOKENS = 80  # up to which there are registers for the sums of two products, beside the totals of two tiles
ROWS, TOKENS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class Narrow:
    """With tokens in float8_e4m3fn."""

    tokens: int

    def accumulate(self, ring: Ring, share: Share, tiles: Array | int, slot: Array) -> tuple[list[Array], Array]:
        """The sums [64, tokens] of each tile of a share, through so many tiles from the slot on, and the next slot."""
        shape = (HOPPER_ROWS, self.tokens)
        together = share.stack if self.tokens <= FEW_TOKENS else 1  # products that run at a time
        ahead = together == share.stack  # codes of the next slot are loaded meanwhile: there are registers for them

        def along(rows: Array) -> Array:
            return lax.broadcast_in_dim(rows, shape, [0])

        def load(slot: Array) -> tuple[Array, ...]:
            plgpu.barrier_wait(ring.full.at[slot])
            return tuple(_codes(ring, slot, share.tile(i)) for i in range(share.stack) if ahead)

        def run(*sums: Any) -> Any:
            def multiply(slot: Array, totals: list[Array], loaded: tuple[Array, ...], after: Array | None) -> Any:
                """Adds a slot's products, and loads the one after it, if that is given."""
                loaded_after = loaded
                for products in itertools.batched(range(share.stack), together):
                    # All at once: there is one wait for shared memory then.
                    codes = [loaded[i] if ahead else _codes(ring, slot, share.tile(i)) for i in products]
                    of_rows = [scale_and_zero(_words(ring, slot, share.tile(i))) for i in products]
                    numbers = [gpu_w4a8_decode.decode(each) for each in codes]
                    for each in sums:
                        each[...] = zeros(shape)
                    for each, left in zip(sums, numbers, strict=True):
                        plgpu.wgmma(each, left, ring.x.at[slot].transpose((1, 0)))
                    if ahead and after is not None:
                        loaded_after = load(after)
                    of_tokens = lax.broadcast_in_dim(sums_of_tokens(ring, slot, self.tokens), shape, [1])
                    for i, (scale, zero) in zip(products, of_rows, strict=True):
                        totals[i] -= along(zero * scale * (1 / SMALLER)) * of_tokens
                    for i, each, (scale, _) in zip(products, sums, of_rows, strict=True):
                        found = plgpu.wgmma_accumulator_load(each, wait_n=products[-1] - i)
                        # Without the barrier, the compiler may read it before the wait.
                        totals[i] += lax.optimization_barrier(found) * along(scale)
                plgpu.barrier_arrive(ring.empty.at[slot])
                return totals, loaded_after

            def tile(_: Array, carry: Any) -> Any:
                slot, totals, loaded = carry
                after = ring.after(slot)
                totals, loaded = multiply(slot, list(totals), loaded, after)
                if not ahead:
                    load(after)
                return after, tuple(totals), loaded

            begin = slot, tuple(zeros(shape) for _ in range(share.stack)), load(slot)
            last, totals, loaded = lax.fori_loop(0, tiles - 1, tile, begin)
            return multiply(last, list(totals), loaded, None)[0], ring.after(last)

        return pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * together)


def zeros(shape: tuple[int, int]) -> Array:
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


def sums_of_tokens(ring: Ring, slot: Array, count: int) -> Array:
    return plgpu.load(ring.sums.at[slot, pl.ds(0, count)], layout=TOKENS, optimized=False)


def _codes(ring: Ring, slot: Array, tile: Any) -> Array:
    return plgpu.load(ring.codes.at[slot, tile], layout=gpu_w4a8_decode.WORDS)


def _words(ring: Ring, slot: Array, tile: Any) -> Array:
    """With the scale and the zero of each row."""
    return plgpu.load(ring.scale.at[slot, tile, 0], layout=ROWS, optimized=False)
