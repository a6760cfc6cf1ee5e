"""What a warpgroup on Hopper does with slots of 4-bit codes and tokens in 8 bits: it multiplies by the codes as they
are, and its float32 sums of a tile, which is one group, by their scales.

A product begins with what the zeros take away, which is as much of the sum of a token's numbers. While it runs, the one
before is multiplied by its scales and added.
"""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.quant_matmul import gpu_w4a8_decode
from hex_llm.kernels.quant_matmul.gpu_ring import Ring, Share
from hex_llm.kernels.quant_matmul.gpu_w4a8_layout import SMALLER, scale_and_zero
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, HOPPER_ROWS

LINE = HOPPER_COLUMNS  # numbers of a token that are swizzled together
MOST_TOKENS = 64  # of a product: there are registers for two of them, and for all sums
UNDER_WAY = 2
ROW_UNIT = 8  # tokens that a product takes a multiple of
ROWS, TOKENS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def padded(tokens: int) -> int:
    """The rows that a product of so many tokens takes and gives: as many in each of its parts, a multiple of 8."""
    unit = ROW_UNIT * -(-tokens // MOST_TOKENS)
    return -(-tokens // unit) * unit


@dataclass(frozen=True)
class Narrow:
    """With tokens in float8_e4m3fn."""

    tokens: int

    @property
    def parts(self) -> int:
        """Into which the tokens of a sum are cut."""
        return -(-self.tokens // MOST_TOKENS)

    @property
    def width(self) -> int:
        return self.tokens // self.parts

    def accumulate(self, ring: Ring, share: Share, tiles: Array | int, slot: Array) -> tuple[list[Array], Array]:
        """The sums [64, width] of each tile of a share and each part of the tokens, through so many tiles from the slot
        on, and the next slot."""
        products = list(itertools.product(range(share.stack), range(self.parts)))
        shape = (HOPPER_ROWS, self.width)
        count = UNDER_WAY if len(products) == UNDER_WAY else 1

        def along(rows: Array) -> Array:
            return lax.broadcast_in_dim(rows, shape, [0])

        def run(*sums: Any) -> Any:
            def tile(t: Array, carry: Any) -> Any:
                slot, totals = carry
                totals = list(totals)
                plgpu.barrier_wait(ring.full.at[slot])
                # All at once where there are registers for it: there is one wait for shared memory then.
                of_tiles = (
                    {}
                    if len(products) > UNDER_WAY
                    else {i: self._load(ring, slot, share.tile(i)) for i in range(share.stack)}
                )
                for product in range(len(products) + count):
                    if product >= count:
                        # One of those under way ends, whose registers are free then.
                        done, left = product - count, min(product, len(products)) - (product - count) - 1
                        found = plgpu.wgmma_accumulator_load(sums[done % count], wait_n=left)
                        # Without the barrier, the compiler may read it before the wait.
                        totals[done] += lax.optimization_barrier(found) * along(of_tiles[products[done][0]].scale)
                    if product < len(products):
                        i, part = products[product]
                        if i not in of_tiles:
                            of_tiles[i] = self._load(ring, slot, share.tile(i))
                        at = pl.ds(part * self.width, self.width)
                        of_tokens = plgpu.load(ring.sums.at[slot, at], layout=TOKENS, optimized=False)
                        zero = along(of_tiles[i].zero * (-1 / SMALLER))
                        sums[product % count][...] = zero * lax.broadcast_in_dim(of_tokens, shape, [1])
                        plgpu.wgmma(sums[product % count], of_tiles[i].numbers, ring.x.at[slot, at].transpose((1, 0)))
                plgpu.barrier_arrive(ring.empty.at[slot])
                return ring.after(slot), tuple(totals)

            zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            start = slot, (zeros,) * len(products)
            end, totals = lax.fori_loop(0, tiles, tile, start)
            return list(totals), end

        return pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * count)

    def _load(self, ring: Ring, slot: Array, tile: Any) -> "_Tile":
        codes = plgpu.load(ring.codes.at[slot, tile], layout=gpu_w4a8_decode.WORDS)
        words = plgpu.load(ring.scale.at[slot, tile, 0], layout=ROWS, optimized=False)
        return _Tile(gpu_w4a8_decode.decode(codes), *scale_and_zero(words))


class _Tile(NamedTuple):
    """Of the weight."""

    numbers: Array  # [64, 128] float8_e4m3fn
    scale: Array  # [64] float32
    zero: Array  # likewise
