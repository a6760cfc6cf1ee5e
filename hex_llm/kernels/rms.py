"""Root-mean-square normalisation, as a kernel's reference needs it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True, slots=True)
class Rms:
    """How a model normalises."""

    eps: float
    plus_one: bool = False  # the factor is 1 + the weight, and the result is rounded once, as in Gemma

    @property
    def neutral(self) -> float:
        """The weight that changes nothing."""
        return 0.0 if self.plus_one else 1.0


def rms_norm(x: Array, weight: Array, rms: Rms) -> Array:
    """[..., D] scaled to unit mean square, in float32, then rounded and multiplied by the weight."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + rms.eps)
    if rms.plus_one:
        return (wide * jnp.broadcast_to(1 + weight.astype(jnp.float32), x.shape)).astype(x.dtype)
    return wide.astype(x.dtype) * jnp.broadcast_to(weight.astype(x.dtype), x.shape)
