"""What a warpgroup does with the sums [64 rows of a weight, tokens] of its products."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def add_to_rows(sums: Array, bias_ref: Any) -> Array:
    return sums + lax.broadcast_in_dim(load(bias_ref, plgpu.Layout.WGMMA.reduce(1)), sums.shape, [0])


def store(ref: Any, result: Array) -> None:
    """To [tokens, 64]. Turned round, each thread has two neighbours of one token, and a warp writes whole sectors."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
