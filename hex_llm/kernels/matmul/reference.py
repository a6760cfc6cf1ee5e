"""What the products of a layer, and what stands between them, mean in plain JAX. The kernels are tested against it."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation, gated
from hex_llm.kernels.rms import Rms, rms_norm


def matmul(x: Array, weight: Array, *, dtype: jnp.dtype | None = None) -> Array:
    """[M, in] x [out, in] -> [M, out], summed in float32 and rounded to `dtype`, or the type of `x`."""
    return _float32(x, weight).astype(dtype or x.dtype)


def gated_matmul(x: Array, weight: Array, activation: Activation) -> Array:
    """[M, in] x [2F, in] -> [M, F]: the others gated by the gate's rows, which come first; rounded once."""
    both = _float32(x, weight)
    size = both.shape[1] // 2
    return gated(activation, both[:, :size], both[:, size:]).astype(x.dtype)


def add_norm(x: Array, pieces: Array, weight: Array, rms: Rms, *, inner: Array | None = None) -> tuple[Array, Array]:
    """(y, norm of y) for y = `add(x, pieces, rms, inner=inner)`."""
    y = add(x, pieces, rms, inner=inner)
    return y, rms_norm(y, weight, rms)


def add(x: Array, pieces: Array, rms: Rms, *, inner: Array | None = None) -> Array:
    """x [M, D] + the sum of `pieces` [n, M or more, D], which is rounded to the type of `x` first.

    With the weight `inner` [D], the rounded sum is normalised before it is added.
    """
    added = total(pieces)[: x.shape[0]].astype(x.dtype)
    return x + (added if inner is None else rms_norm(added, inner, rms))


def total(pieces: Array) -> Array:
    """The sum over the first axis, written as additions: they fuse into whatever comes next, a reduction may not."""
    return functools.reduce(jnp.add, [pieces[i] for i in range(pieces.shape[0])])


def _float32(x: Array, weight: Array) -> Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
