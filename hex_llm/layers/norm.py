"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from jax import Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """[..., D] scaled to unit mean square, in float32, then rounded and multiplied by the weight."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * jnp.broadcast_to(weight.astype(x.dtype), x.shape)
