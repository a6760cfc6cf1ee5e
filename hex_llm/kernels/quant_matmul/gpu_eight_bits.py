"""The product of a decode batch with a weight on Hopper where both are in 8 bits: that of `matmul.gpu`."""

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.matmul import gpu
from hex_llm.kernels.matmul.gpu import Plan, Scales
from hex_llm.kernels.quant_matmul import gpu_rows
from hex_llm.kernels.quant_matmul.rows import TYPES, Rows, Tokens, taken_by
from hex_llm.kernels.quant_matmul.weight import Packed


def supports(x: Tokens, weight: Packed, *, activation: Activation | None = None) -> bool:
    """Whether there is a plan for [M, in] x [out, in]."""
    if weight.coding not in TYPES or weight.order is not None or weight.data.ndim != 2 or x.dtype != jnp.bfloat16:
        return False
    rows = jax.ShapeDtypeStruct(x.shape, weight.data.dtype)
    return gpu_rows.supports(x.shape[1]) and gpu.supports(rows, weight.data, activation=activation)


def parts(
    x: Tokens,
    weight: Packed,
    *,
    dtype: jnp.dtype | None = None,
    plan: Plan | None = None,
    activation: Activation | None = None,
) -> Array:
    """As `matmul.gpu.parts`, where `reference` says what is multiplied: [splits, padded(M), out], or with an activation
    [1, padded(M), F]."""
    rows = x if isinstance(x, Rows) else gpu_rows.quantize(x, taken_by(weight))
    scales = Scales(rows.scale, weight.scale.reshape(-1))
    dtype = dtype or rows.dtype
    return gpu.parts(rows.values, weight.data, dtype=dtype, plan=plan, activation=activation, scales=scales)
