"""Tokens as products with weights of 4 bits take them in 8 bits on Hopper."""

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.quant_matmul import gpu_rows
from hex_llm.kernels.quant_matmul.rows import Rows, Tokens, taken_by
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, Packed
from hex_llm.pytree import pytree


@pytree
class Known:
    """What a product has to know of its tokens, float32."""

    scale: Array  # [M]
    sums: Array  # [in / 128, M]: of each token's numbers in a tile's columns


def narrow(x: Tokens, weight: Packed, count: int) -> tuple[Array, Known]:
    """Tokens [M, in] as [count, in] float8_e4m3fn, filled up with zeros."""
    rows = x if isinstance(x, Rows) else gpu_rows.quantize(x, taken_by(weight), rows=count)
    sums = rows.sums
    if sums is None:
        sums = jnp.sum(rows.values.astype(jnp.float32).reshape(rows.shape[0], -1, HOPPER_COLUMNS), axis=2).T

    def filled(array: Array, axis: int) -> Array:
        array = lax.slice_in_dim(array, 0, min(count, array.shape[axis]), axis=axis)
        more = count - array.shape[axis]
        return jnp.pad(array, [(0, more if i == axis else 0) for i in range(array.ndim)]) if more else array

    return filled(rows.values, 0), Known(filled(rows.scale, 0), filled(sums, 1))
