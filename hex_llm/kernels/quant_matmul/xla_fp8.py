"""The product of many tokens with an fp8 weight, in the form that XLA gives to cuBLASLt."""

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.quant_matmul.rows import Rows
from hex_llm.kernels.quant_matmul.weight import Packed


def matmul(rows: Rows, weight: Packed, *, dtype: jnp.dtype) -> Array:
    """[M, in] x [out, in] -> [M, out] in `dtype`.

    cuBLASLt multiplies by one scale for all: those of tokens and of rows are left to what XLA makes of what comes next.
    The sum is rounded to `dtype` before they multiply it, too: in float32 it would be twice as much to write and read.
    """
    total = lax.dot_general(rows.values, weight.data, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    scale = rows.scale[:, None] * weight.scale[:, 0][None, :]
    return (total.astype(jnp.float32) * scale).astype(dtype)
