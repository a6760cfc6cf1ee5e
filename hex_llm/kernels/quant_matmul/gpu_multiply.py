"""What a warpgroup on Hopper does with slots of codes: it makes bfloat16 numbers of them, and multiplies by those.

While a product runs, it decodes what the next one needs.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.quant_matmul import gpu_decode
from hex_llm.kernels.quant_matmul.gpu_layout import CHUNK, CHUNKS, Grouping, chunk_lines
from hex_llm.kernels.quant_matmul.gpu_ring import Ring, Run, Share
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, HOPPER_ROWS, Coding


@dataclass(frozen=True)
class Wide:
    """With tokens in bfloat16."""

    coding: Coding
    grouping: Grouping | None
    tokens: int
    depth: int  # columns of a slot: a tile's, or half of them

    def accumulate(self, ring: Ring, share: Share, run: Run, slot: Array) -> tuple[list[Array], Array]:
        """The sums [64, tokens] of each tile of a share, through a run of them from the slot on, and the next slot."""
        cuts = HOPPER_COLUMNS // self.depth

        def multiply(*totals: Any) -> Any:
            def tile(t: Array, slot: Array) -> Array:
                for cut in range(cuts):
                    chunks = range(cut * CHUNKS // cuts, (cut + 1) * CHUNKS // cuts)
                    slot = self._multiply(ring, share, totals, slot, chunks, is_first=(t == 0) & (cut == 0))
                return slot

            end = lax.fori_loop(0, run.length, tile, slot)
            return [each[...] for each in totals], ring.before(end)

        sums = [plgpu.WGMMAAccumulatorRef((HOPPER_ROWS, self.tokens), jnp.float32)] * share.stack
        totals, last = pl.run_scoped(multiply, *sums)
        plgpu.barrier_arrive(ring.empty.at[last])
        return totals, ring.after(last)

    def _multiply(
        self, ring: Ring, share: Share, totals: Sequence[Any], slot: Array, chunks: range, *, is_first: Array
    ) -> Array:
        """Decodes and multiplies what is in a slot."""
        plgpu.barrier_wait(ring.full.at[slot])
        products = list(itertools.product(chunks, range(share.stack)))
        # All at once: there is one wait for shared memory then, and not one for each product.
        loaded = [self._load(ring, slot, share.tile(i), chunk) for chunk, i in products]
        for (chunk, i), (codes, scales) in zip(products, loaded, strict=True):
            right = ring.x.at[slot, :, pl.ds(chunk % len(chunks) * CHUNK, CHUNK)]
            left = gpu_decode.decode(codes, scales, self.coding, self.grouping, chunk)
            plgpu.wgmma(totals[i], left, right.transpose((1, 0)))
            # The registers of the product before are free, and at first all of the slot before.
            plgpu.wgmma_wait(1)
            if (chunk, i) == products[0]:
                # Not by a branch: that would keep products from running side by side.
                plgpu.barrier_arrive(ring.empty.at[ring.before(slot)], predicate=~is_first)
        return ring.after(slot)

    def _load(self, ring: Ring, slot: Array, tile: Any, chunk: int) -> tuple[Array, tuple[Array, ...]]:
        """A chunk's codes, and the scales that they need."""
        count = chunk_lines(self.coding)
        codes = ring.codes.at[slot, tile, pl.ds(chunk % (self.depth // CHUNK) * count, count)]
        places = () if self.grouping is None else gpu_decode.words_of(self.grouping, chunk)
        scales = [ring.scale.at[slot, tile, place % ring.scale.shape[2]] for place in places]
        return (
            plgpu.load(codes, layout=gpu_decode.word_layout(self.coding)),
            tuple(plgpu.load(each, layout=gpu_decode.ROW_LAYOUT, optimized=False) for each in scales),
        )
