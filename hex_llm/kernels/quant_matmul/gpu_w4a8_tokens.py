"""Tokens as products with weights of 4 bits take them in 8 bits on Hopper."""

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.quant_matmul import gpu_rows
from hex_llm.kernels.quant_matmul.rows import Rows, Tokens, sums_shape, taken_by, two_parts
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, Packed
from hex_llm.pytree import pytree


@pytree
class Known:
    """What a product has to know of its tokens."""

    scale: Array  # [M] float32
    sums: Array  # as `Rows.sums`


def narrow(x: Tokens, weight: Packed, count: int) -> tuple[Array, Known]:
    """Tokens [M, in] as [count, in] float8_e4m3fn, filled up with zeros."""
    rows = x if isinstance(x, Rows) else gpu_rows.quantize(x, taken_by(weight), rows=count)
    sums = rows.sums
    if sums is None:
        sums = _sums(rows.values)

    def filled(array: Array, axis: int) -> Array:
        array = lax.slice_in_dim(array, 0, min(count, array.shape[axis]), axis=axis)
        more = count - array.shape[axis]
        return jnp.pad(array, [(0, more if i == axis else 0) for i in range(array.ndim)]) if more else array

    return filled(rows.values, 0), Known(filled(rows.scale, 0), filled(sums, 1))


def _sums(values: Array) -> Array:
    """As `Rows.sums`."""
    shape = sums_shape(*values.shape)
    added = jnp.sum(values.astype(jnp.float32).reshape(shape[1], -1, HOPPER_COLUMNS), axis=2)
    added = jnp.pad(added, ((0, 0), (0, shape[2] - added.shape[1])))
    return jnp.stack(two_parts(added))
