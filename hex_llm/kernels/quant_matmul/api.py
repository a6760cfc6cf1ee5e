"""Products with weights in few bits: how they are laid out, and which implementation multiplies, where."""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.quant_matmul import plain, xla
from hex_llm.kernels.quant_matmul.weight import Codes, Packed


def pack(codes: Codes) -> Packed:
    """The weight, or a device's share of it, in the layout that the kernel for it takes. To be traced."""
    return plain.pack(codes)


def unpack(weight: Packed) -> Codes:
    """The other way: of what `pack` made, the codes."""
    return plain.unpack(weight)


def matmul(x: Array, weight: Packed, *, dtype: jnp.dtype) -> Array:
    """[M, in] x [out, in] -> [M, out] in `dtype`; see `reference.matmul`."""
    return xla.matmul(x, weight, dtype=dtype)
