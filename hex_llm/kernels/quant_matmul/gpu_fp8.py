"""The product of a decode batch with an fp8 weight on Hopper: that of `matmul.gpu`, with operands of 8 bits."""

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.matmul import gpu
from hex_llm.kernels.matmul.gpu import Plan, Scales
from hex_llm.kernels.quant_matmul import gpu_fp8_rows
from hex_llm.kernels.quant_matmul.rows import Rows, Tokens, taken_by
from hex_llm.kernels.quant_matmul.weight import Packed


def supports(x: Tokens, weight: Packed, *, activation: Activation | None = None) -> bool:
    """Whether there is a plan for [M, in] x [out, in]."""
    if weight.coding != "fp8" or weight.order is not None or weight.data.ndim != 2 or x.dtype != jnp.bfloat16:
        return False
    rows = jax.ShapeDtypeStruct(x.shape, weight.data.dtype)
    return gpu_fp8_rows.supports(x.shape[1]) and gpu.supports(rows, weight.data, activation=activation)


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
    rows = x if isinstance(x, Rows) else gpu_fp8_rows.quantize(x, taken_by(weight))
    scales = Scales(rows.scale, weight.scale.reshape(-1))
    dtype = dtype or rows.dtype
    return gpu.parts(rows.values, weight.data, dtype=dtype, plan=plan, activation=activation, scales=scales)
