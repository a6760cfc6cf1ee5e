"""What a product with a weight in few bits means in plain JAX. Every layout and every kernel is tested against it."""

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels import float8
from hex_llm.kernels.activation import Activation, gated
from hex_llm.kernels.quant_matmul.weight import TABLES, Codes

FP8_ZERO = 2.0**-100  # a row without a larger number is of zeros: what divides by its scale must not overflow


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

    With fp8, `x` is in 8 bits, too: see `quantize_rows`.
    """
    return _float32(x, weight).astype(dtype or x.dtype)


def gated_matmul(x: Array, weight: Codes, activation: Activation) -> Array:
    """[M, in] x [2F, in] -> [M, F]: the others gated by the gate's rows, which come first; rounded once."""
    both = _float32(x, weight)
    size = both.shape[1] // 2
    return gated(activation, both[:, :size], both[:, size:]).astype(x.dtype)


def quantize_rows(x: Array, input_scale: Array | None) -> tuple[Array, Array]:
    """[M, in] -> float8_e4m3fn [M, in] and the scales [M, 1] float32 of its rows, or the one that all have.

    A row's own scale makes its largest number the largest there is; a row of zeros has scale 1. One division is made
    for a row, and not for each of its numbers: kernels then give the same bits without taking longer.
    """
    values, scale = scale_rows(x, input_scale)
    return values.astype(jnp.float8_e4m3fn), scale


def scale_rows(x: Array, input_scale: Array | None) -> tuple[Array, Array]:
    """What `quantize_rows` rounds, in float32, and the scales."""
    wide = x.astype(jnp.float32)
    if input_scale is None:
        largest = jnp.max(jnp.abs(wide), axis=1, keepdims=True)
        scale = jnp.where(largest > FP8_ZERO, largest / float8.LARGEST, 1.0)
    else:
        scale = jnp.broadcast_to(input_scale.astype(jnp.float32), (x.shape[0], 1))
    return jnp.clip(wide * (1 / scale), -float8.LARGEST, float8.LARGEST), scale


def _float32(x: Array, weight: Codes) -> Array:
    if weight.order is not None:
        x = x[:, weight.order]
    values = dequantize(weight)
    if weight.coding == "fp8":
        rows, scale = quantize_rows(x, weight.input_scale)
        x = rows.astype(jnp.float32) * scale
    return jax.lax.dot_general(
        x.astype(jnp.float32), values, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
    )
