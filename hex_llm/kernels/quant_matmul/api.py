"""Products with weights in few bits: how they are laid out, and which implementation multiplies, where."""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.quant_matmul import plain, xla
from hex_llm.kernels.quant_matmul.weight import Codes, Packed
from hex_llm.parallel.backend import backend


def pack(codes: Codes) -> Packed:
    """The weight, or a device's share of it, in the layout that the kernel for it takes. To be traced."""
    if backend() == "tpu":
        from hex_llm.kernels.quant_matmul import tpu_layout

        if tpu_layout.fits(codes):
            return tpu_layout.pack(codes)
    return plain.pack(codes)


def unpack(weight: Packed) -> Codes:
    """The other way: of what `pack` made, the codes."""
    if weight.layout == "tpu":
        from hex_llm.kernels.quant_matmul import tpu_layout

        return tpu_layout.unpack(weight)
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
    if weight.layout == "tpu":
        # Imported where it is used: Pallas takes a second, which a start on a CPU has better use for.
        from hex_llm.kernels.quant_matmul import tpu

        return tpu.matmul(x, weight, dtype=dtype)
    return xla.matmul(x, weight, dtype=dtype)
