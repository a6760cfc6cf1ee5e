"""Products with weights in few bits: how they are laid out, and which implementation multiplies, where."""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.quant_matmul import plain, xla
from hex_llm.kernels.quant_matmul.weight import Codes, Packed


def pack(codes: Codes) -> Packed:
    """The weight, or a device's share of it, in the layout that the kernel for it takes. To be traced."""
    return plain.pack(codes)


def unpack(weight: Packed) -> Codes:
    """The other way: of what `pack` made, the codes."""
    return plain.unpack(weight)


def takes(x: Array, weight: Packed, *, activation: Activation | None = None) -> bool:
    """Whether the product of x [M, in] with a weight [out, in], gated where there is one, belongs to a chain."""
    return False


def parts(x: Array, weight: Packed, *, dtype: jnp.dtype | None = None) -> Array:
    """As `matmul.api.parts`, of what `takes` takes."""
    raise NotImplementedError


def gated_matmul(x: Array, weight: Packed, activation: Activation) -> Array:
    """As `matmul.api.gated_matmul`, of what `takes` takes."""
    raise NotImplementedError


def matmul(x: Array, weight: Packed, *, dtype: jnp.dtype) -> Array:
    """[M, in] x [out, in] -> [M, out] in `dtype`; see `reference.matmul`."""
    return xla.matmul(x, weight, dtype=dtype)
