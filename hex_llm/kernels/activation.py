"""What a gate does to the other half of a feed-forward layer."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

type Activation = Literal["silu", "gelu", "clamped_silu"]

LIMIT = 7.0  # of the clamped one
STEEPNESS = 1.702


def gated(activation: Activation, gate: Array, up: Array) -> Array:
    match activation:
        case "silu":
            return jax.nn.silu(gate) * up
        case "gelu":  # the approximation by tanh, which is what models are trained with
            return jax.nn.gelu(gate, approximate=True) * up
        case "clamped_silu":
            gate = jnp.minimum(gate, LIMIT)
            return gate * jax.nn.sigmoid(STEEPNESS * gate) * (jnp.clip(up, -LIMIT, LIMIT) + 1)
