"""The products of a chain, and what stands between them: each fetches its weight while the kernel in front still runs.

What is not taken goes the plain way, which layers have anyway.
"""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.chain import chained
from hex_llm.kernels.matmul import reference
from hex_llm.kernels.quant_matmul.rows import EightBits, Tokens
from hex_llm.kernels.rms import Rms


def takes(x: Array, weight: Array, *, activation: Activation | None = None) -> bool:
    """Whether the product of x [M, in] with a weight [out, in], gated where there is one, belongs to such a chain."""
    if not chained(x.shape[0]):
        return False
    # Imported where it is used: Pallas takes a second, which a start on a CPU has better use for.
    from hex_llm.kernels.matmul import gpu

    return gpu.supports(x, weight, activation=activation)


def parts(x: Array, weight: Array, *, dtype: jnp.dtype | None = None) -> Array:
    """[M, in] x [out, in] -> [n, M, out], to be added; M grows to a multiple of 8, by rows that mean nothing.

    In float32, or where n is 1 in `dtype`, or the type of `x`. The sum is `reference.matmul`.
    """
    from hex_llm.kernels.matmul import gpu

    return gpu.parts(x, weight, dtype=dtype)


def gated_matmul(x: Array, weight: Array, activation: Activation) -> Array:
    """As `reference.gated_matmul`, but M grows to a multiple of 8, by rows that mean nothing."""
    from hex_llm.kernels.matmul import gpu

    return gpu.parts(x, weight, activation=activation)[0]


def add_norm(
    x: Array, pieces: Array, weight: Array, rms: Rms, *, inner: Array | None = None, eight_bits: EightBits | None = None
) -> tuple[Array, Tokens]:
    """As `reference.add_norm`, but in a chain the rows of the norm, not those of `x`, grow to a multiple of 8, and come
    in 8 bits where they are wanted so."""
    if chained(x.shape[0]):
        from hex_llm.kernels.matmul import add_norm_gpu

        if add_norm_gpu.supports(x.shape[1]):
            return add_norm_gpu.add_norm(x, pieces, weight, rms, inner=inner, eight_bits=eight_bits)
    return reference.add_norm(x, pieces, weight, rms, inner=inner)
