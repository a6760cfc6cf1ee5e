"""What a worker of decode attention does with one tile: products on the tensor cores, and values not to be seen."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.hopper import LOG2E, MMA_ROWS
from hex_llm.kernels.paged_attention import gpu_scales
from hex_llm.kernels.paged_attention.gpu_decode_chunks import Refs
from hex_llm.kernels.window import Window

ABOVE_ALL = 1e4  # of scores, which for queries of zeros are 0


@dataclasses.dataclass(frozen=True)
class Softmax:
    """How scores become weights."""

    scale: float
    window: Window | None
    soft_cap: float | None

    def scores(self, products: Array) -> Array:
        """The exponents, to base 2, of the weights that products of queries and keys stand for."""
        if self.soft_cap is None:
            return products * (self.scale * LOG2E)
        # tanh by exp2: the hardware's own tanh is coarser than bfloat16 once it is multiplied by the cap.
        power = jnp.exp2(products * (2 * LOG2E * self.scale / self.soft_cap))
        return (self.soft_cap * LOG2E) - (2 * self.soft_cap * LOG2E) / (1 + power)


def product(q_ref: Any, keys_ref: Any, tile: int) -> Array:
    """Queries times keys: [MMA_ROWS, tile]."""

    def multiply(products_ref: Any) -> Array:
        plgpu.wgmma(products_ref, q_ref, keys_ref.transpose((1, 0)))
        return products_ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((MMA_ROWS, tile), jnp.float32))


def add_product(values: Array, weights: Array, kv_ref: Any, slot: Array) -> Array:
    """`values` plus weights times the values of the tile in a slot."""

    def multiply(sum_ref: Any) -> None:
        plgpu.wgmma(sum_ref, weights, kv_ref.at[slot, 1])

    total: Any = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(values))
    return total


def clear_unseen(values_ref: Any, first: Array, end: Array) -> None:
    """Zeros the values outside first..end-1: memory there may hold NaN, which a weight of 0 would not take away."""
    narrow = values_ref.dtype.itemsize == 1
    layout = plgpu.Layout.WGMMA_8BIT if narrow else plgpu.Layout.WGMMA
    for columns in pieces(values_ref.shape[1], 128 if narrow else 64):
        piece = values_ref.at[:, columns]
        values = plgpu.load(piece, layout=layout)
        if narrow:  # and back, exactly: there is no choosing between numbers of 8 bits
            values = values.astype(jnp.float16)
        position = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
        seen = (position >= first) & (position < end)
        piece[...] = jnp.where(seen, values, jnp.zeros_like(values)).astype(values_ref.dtype)
    plgpu.commit_smem()


def tile_scales(refs: Refs, slot: Array, axis: int, first: Array, end: Array) -> tuple[Array | None, Array | None]:
    """Of the keys and the values of the tile in a slot, where pages have some. Of values that are not to be seen 0:
    what others left there may be NaN, as their numbers cannot."""
    if refs.scales_smem is None:
        return None, None
    keys, values = (gpu_scales.load(refs.scales_smem.at[slot, kind], axis) for kind in range(2))
    position = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=gpu_scales.layout(axis))
    return keys, jnp.where((position >= first) & (position < end), values, jnp.zeros_like(values))


def pieces(head_dim: int, width: int) -> list[Any]:
    """Slices of the columns: what passes through registers does so in parts, as few are free."""
    size = width if head_dim % width == 0 else head_dim
    return [pl.ds(start, size) for start in range(0, head_dim, size)]


def per_row(value: float) -> Array:
    return plgpu.layout_cast(jnp.full((MMA_ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def least_of_rows(rows: int) -> Array:
    """What a row's largest score is before its first tile. Past `rows` so much that all weights are 0."""
    row = plgpu.broadcasted_iota(jnp.int32, (MMA_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    return jnp.where(row < rows, per_row(-jnp.inf), per_row(ABOVE_ALL))


def spread(per_row: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(per_row, shape, [0])


def widen(refs: Refs, slot: Array, worker: Array) -> None:
    """Copies a tile of 8-bit keys and values to where a worker's wgmma reads them, in 16 bits."""
    plgpu.commit_smem()  # every warp has read the last tile
    for kind in range(2):
        for columns in pieces(refs.kv_smem.shape[-1], 128):
            narrow = plgpu.load(refs.kv_smem.at[slot, kind, :, columns], layout=plgpu.Layout.WGMMA_8BIT)
            refs.wide_smem[worker, kind, :, columns] = narrow.astype(refs.wide_smem.dtype)
    plgpu.commit_smem()
