"""Products with weights in few bits, in plain XLA."""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.quant_matmul import plain, reference
from hex_llm.kernels.quant_matmul.weight import Packed


def matmul(x: Array, weight: Packed, *, dtype: jnp.dtype) -> Array:
    return reference.matmul(x, plain.unpack(weight), dtype=dtype)
