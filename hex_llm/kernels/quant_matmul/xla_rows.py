"""Products of tokens in 8 bits with weights in 8 bits, in the form that XLA gives to a library: cuBLASLt on GPUs."""

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.quant_matmul.rows import Rows
from hex_llm.kernels.quant_matmul.weight import Packed
from hex_llm.parallel.backend import backend

# With one, XLA's CPU backend writes out the weight in 32 bits first, and with two or three it is no faster.
CPU_ROWS = 4


def matmul(rows: Rows, weight: Packed, *, dtype: jnp.dtype) -> Array:
    """[M, in] x [out, in] -> [M, out] in `dtype`.

    cuBLASLt multiplies by one scale for all: those of tokens and of rows are left to what XLA makes of what comes next.
    The sum of fp8 is rounded to `dtype` before they multiply it, too: in float32 it would be twice as much to write and
    read. Of whole numbers there is no narrower one than in int32.
    """
    values, count = rows.values, rows.shape[0]
    if count < CPU_ROWS and backend() == "cpu":
        values = jnp.pad(values, ((0, CPU_ROWS - count), (0, 0)))
    summed = jnp.int32 if values.dtype == jnp.int8 else dtype
    total = lax.dot_general(values, weight.data, (((1,), (1,)), ((), ())), preferred_element_type=summed)[:count]
    scale = rows.scale[:, None] * weight.scale[:, 0][None, :]
    return (total.astype(jnp.float32) * scale).astype(dtype)
