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
from hex_llm.kernels.quant_matmul.weight import HOPPER_ROWS

UNDER_WAY = 2
ROWS, TOKENS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class Narrow:
    """With tokens in float8_e4m3fn."""

    parts: int  # into which the tokens of a sum are cut
    width: int  # of each

    def accumulate(self, ring: Ring, share: Share, tiles: Array | int, slot: Array) -> tuple[list[Array], Array]:
        """The sums [64, width] of each tile of a share and each part of the tokens, through so many tiles from the slot
        on, and the next slot."""
        products = list(itertools.product(range(share.stack), range(self.parts)))
        shape = (HOPPER_ROWS, self.width)
        # As many sums are under way as there are registers for, beside all totals.
        count = UNDER_WAY if len(products) == UNDER_WAY else 1

        def along(rows: Array) -> Array:
            return lax.broadcast_in_dim(rows, shape, [0])

        def run(*sums: Any) -> Any:
            def tile(_: Array, carry: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
                slot, totals = carry[0], list(carry[1])
                plgpu.barrier_wait(ring.full.at[slot])
                loaded: dict[int, _Tile] = {}
                if len(products) <= UNDER_WAY:
                    # All at once: there is one wait for shared memory then.
                    loaded = {i: _load(ring, slot, share.tile(i)) for i in range(share.stack)}

                def start(product: int) -> None:
                    i, part = products[product]
                    if i not in loaded:
                        loaded[i] = _load(ring, slot, share.tile(i))
                    at = pl.ds(part * self.width, self.width)
                    of_tokens = lax.broadcast_in_dim(sums_of_tokens(ring, slot, at), shape, [1])
                    sum_ref = sums[product % count]
                    sum_ref[...] = along(loaded[i].zero * (-1 / SMALLER)) * of_tokens
                    plgpu.wgmma(sum_ref, loaded[i].numbers, ring.x.at[slot, at].transpose((1, 0)))

                def finish(product: int, *, started: int) -> None:
                    found = plgpu.wgmma_accumulator_load(sums[product % count], wait_n=started - product - 1)
                    # Without the barrier, the compiler may read it before the wait.
                    totals[product] += lax.optimization_barrier(found) * along(loaded[products[product][0]].scale)

                for product in range(len(products)):
                    if product >= count:
                        finish(product - count, started=product)
                    start(product)
                for product in range(len(products) - count, len(products)):
                    finish(product, started=len(products))
                plgpu.barrier_arrive(ring.empty.at[slot])
                return ring.after(slot), tuple(totals)

            zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            end, totals = lax.fori_loop(0, tiles, tile, (slot, (zeros,) * len(products)))
            return list(totals), end

        return pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * count)


def sums_of_tokens(ring: Ring, slot: Array, at: Any) -> Array:
    return plgpu.load(ring.sums.at[slot, at], layout=TOKENS, optimized=False)


class _Tile(NamedTuple):
    """Of the weight."""

    numbers: Array  # [64, 128] float8_e4m3fn
    scale: Array  # [64] float32
    zero: Array  # likewise


def _load(ring: Ring, slot: Array, tile: Any) -> _Tile:
    codes = plgpu.load(ring.codes.at[slot, tile], layout=gpu_w4a8_decode.WORDS)
    words = plgpu.load(ring.scale.at[slot, tile, 0], layout=ROWS, optimized=False)
    return _Tile(gpu_w4a8_decode.decode(codes), *scale_and_zero(words))
