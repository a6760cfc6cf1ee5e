"""What a product with a weight in few bits means in plain JAX. Every layout and every kernel is tested against it."""

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation, gated
from hex_llm.kernels.quant_matmul.rows import TYPES, EightBits, taken_by
from hex_llm.kernels.quant_matmul.weight import TABLES, Codes


def dequantize(weight: Codes) -> Array:
    """[..., out, in] float32, exactly what the codes stand for. Columns are in the weight's own order."""
    *experts, out, size = weight.shape
    groups = weight.scale.shape[-1]
    if weight.coding in TABLES:
        values = jnp.asarray(TABLES[weight.coding])[weight.codes]
    else:
        values = weight.codes.astype(jnp.float32)
    values = values.reshape(*experts, out, groups, size // groups)
    if weight.zero is not None:
        values = values - weight.zero[..., None]
    return (values * weight.scale[..., None]).reshape(*experts, out, size)


def matmul(x: Array, weight: Codes, *, dtype: jnp.dtype | None = None) -> Array:
    """[M, in] x [out, in] -> [M, out], summed in float32 and rounded to `dtype`, or the type of `x`.

    With fp8, w8a8 and w4a8, `x` is in 8 bits, too: see `quantize_rows`. Of w8a8 sums are exact: of whole numbers, in
    int32, which holds those of 131,071 columns.
    """
    return _float32(x, weight).astype(dtype or x.dtype)


def gated_matmul(x: Array, weight: Codes, activation: Activation) -> Array:
    """[M, in] x [2F, in] -> [M, F]: the others gated by the gate's rows, which come first; rounded once."""
    both = _float32(x, weight)
    size = both.shape[1] // 2
    return gated(activation, both[:, :size], both[:, size:]).astype(x.dtype)


def quantize_rows(x: Array, how: EightBits) -> tuple[Array, Array]:
    """[M, in] -> 8 bits [M, in] and the scales [M, 1] float32 of its rows, or the one that all have.

    One division is made for a row, and not for each of its numbers: kernels then give the same bits without taking
    longer.
    """
    values, scale = scale_rows(x, how)
    return how.rounded(values), scale


def scale_rows(x: Array, how: EightBits) -> tuple[Array, Array]:
    """What `quantize_rows` rounds, in float32, and the scales."""
    wide = x.astype(jnp.float32)
    if how.input_scale is None:
        scale = how.own_scale(wide)[:, None]
    else:
        scale = jnp.broadcast_to(how.input_scale.astype(jnp.float32), (x.shape[0], 1))
    return how.within(wide * (1 / scale)), scale


def _float32(x: Array, weight: Codes) -> Array:
    if weight.order is not None:
        x = x[:, weight.order]
    if weight.coding in TYPES:
        rows, scale = quantize_rows(x, taken_by(weight))
        if weight.coding == "w8a8":
            total = jax.lax.dot_general(rows, weight.codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
            return total.astype(jnp.float32) * scale * weight.scale[:, 0][None]
        x = rows.astype(jnp.float32) * scale
    values = dequantize(weight)
    return jax.lax.dot_general(
        x.astype(jnp.float32), values, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
    )
