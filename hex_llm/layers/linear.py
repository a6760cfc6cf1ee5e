"""Multiplying rows by a weight that lies as it does in the checkpoint: [out, in]."""

import jax
import jax.numpy as jnp
from jax import Array


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """[R, in] x [out, in] -> [R, out], summed in float32 and rounded to the type of `x`."""
    return linear_float32(x, weight, bias).astype(x.dtype)


def linear_float32(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """As `linear`, but left in float32: for logits, which sampling compares."""
    if x.shape[0] == 1 and weight.dtype.itemsize < 4 and jax.default_backend() == "cpu":
        # As a product, XLA's CPU backend would write out a float32 copy of the weight first: 85 ms where this sum,
        # which it fuses with the conversion, takes 6.
        out = jnp.sum(weight.astype(jnp.float32) * x.astype(jnp.float32), axis=1)[None, :]
    else:
        out = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return out if bias is None else out + bias.astype(jnp.float32)[None, :]
