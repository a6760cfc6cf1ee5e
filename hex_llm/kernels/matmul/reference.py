"""What the products of a layer, and what stands between them, mean in plain JAX. The kernels are tested against it."""

import functools

import jax
import jax.numpy as jnp
from jax import Array


def matmul(x: Array, weight: Array, *, dtype: jnp.dtype | None = None) -> Array:
    """[M, in] x [out, in] -> [M, out], summed in float32 and rounded to `dtype`, or the type of `x`."""
    return _float32(x, weight).astype(dtype or x.dtype)


def gated_matmul(x: Array, weight: Array) -> Array:
    """[M, in] x [2F, in] -> [M, F]: silu of the gate's rows, which come first, times the others; rounded once."""
    both = _float32(x, weight)
    size = both.shape[1] // 2
    return (jax.nn.silu(both[:, :size]) * both[:, size:]).astype(x.dtype)


def add_norm(x: Array, pieces: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """(y, norm of y) for y = x + the sum of `pieces` [n, M or more, D], which is rounded to the type of `x` first."""
    y = x + total(pieces)[: x.shape[0]].astype(x.dtype)
    return y, rms_norm(y, weight, eps)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """[..., D] scaled to unit mean square, in float32, then rounded and multiplied by the weight."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * jnp.broadcast_to(weight.astype(x.dtype), x.shape)


def total(pieces: Array) -> Array:
    """The sum over the first axis, written as additions: they fuse into whatever comes next, a reduction may not."""
    return functools.reduce(jnp.add, [pieces[i] for i in range(pieces.shape[0])])


def _float32(x: Array, weight: Array) -> Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
