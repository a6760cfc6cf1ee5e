"""Products with weights in few bits: which implementation multiplies, where."""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.chain import chained
from hex_llm.kernels.quant_matmul import xla
from hex_llm.kernels.quant_matmul.layouts import as_plain
from hex_llm.kernels.quant_matmul.weight import Packed


def takes(x: Array, weight: Packed, *, activation: Activation | None = None) -> bool:
    """Whether the product of x [M, in] with a weight [out, in], gated where there is one, belongs to a chain."""
    if weight.layout != "hopper" or not chained(x.shape[0]):
        return False
    # Imported where it is used: Pallas takes a second, which a start on a CPU has better use for.
    from hex_llm.kernels.quant_matmul import gpu

    return gpu.supports(x, weight, activation=activation)


def parts(x: Array, weight: Packed, *, dtype: jnp.dtype | None = None) -> Array:
    """As `matmul.api.parts`, of what `takes` takes."""
    from hex_llm.kernels.quant_matmul import gpu

    return gpu.parts(x, weight, dtype=dtype)


def gated_matmul(x: Array, weight: Packed, activation: Activation) -> Array:
    """As `matmul.api.gated_matmul`, of what `takes` takes."""
    from hex_llm.kernels.quant_matmul import gpu

    return gpu.parts(x, weight, activation=activation)[0]


def matmul(x: Array, weight: Packed, *, dtype: jnp.dtype) -> Array:
    """[M, in] x [out, in] -> [M, out] in `dtype`; see `reference.matmul`."""
    if weight.layout == "hopper" and x.dtype == jnp.bfloat16:
        from hex_llm.kernels.quant_matmul import gpu

        return gpu.matmul(x, weight, dtype=dtype)
    if weight.layout == "tpu":
        from hex_llm.kernels.quant_matmul import tpu

        return tpu.matmul(x, weight, dtype=dtype)
    return xla.matmul(x, as_plain(weight, x.shape[1]), dtype=dtype)
