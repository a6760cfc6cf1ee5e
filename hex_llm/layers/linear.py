"""Multiplying rows by a weight that lies as it does in the checkpoint: [out, in]."""

import jax
import jax.numpy as jnp
from jax import Array

# With fewer rows than this, XLA's CPU backend writes out a wider copy of a 16-bit weight before it multiplies:
# 85 ms where four rows take 6. Float32 weights have no such copy, and one row is their fastest.
_FEWEST_CPU_ROWS = 4


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """[R, in] x [out, in] -> [R, out], summed in float32 and rounded to the type of `x`."""
    return linear_float32(x, weight, bias).astype(x.dtype)


def linear_float32(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """As `linear`, but left in float32: for logits, which sampling compares."""
    num_rows = x.shape[0]
    if num_rows < _FEWEST_CPU_ROWS and weight.dtype.itemsize < 4 and jax.default_backend() == "cpu":
        x = jnp.pad(x, ((0, _FEWEST_CPU_ROWS - num_rows), (0, 0)))
    out = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    out = out[:num_rows]
    return out if bias is None else out + bias.astype(jnp.float32)[None, :]
