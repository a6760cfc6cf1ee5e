"""What a gate does, as the Hopper kernels compute it: with nothing but one exponential and one division."""

import math

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import LIMIT, STEEPNESS, Activation

GELU_STEEPNESS = 2 * math.sqrt(2 / math.pi)
GELU_CUBE = 0.044715


def gated(activation: Activation, gate: Array, up: Array) -> Array:
    """As `activation.gated`: each is the gate times a sigmoid, for (1 + tanh(x)) / 2 is that of 2x."""
    match activation:
        case "silu":
            exponent = gate
        case "gelu":
            exponent = gate * (GELU_STEEPNESS + GELU_STEEPNESS * GELU_CUBE * gate * gate)
        case "clamped_silu":
            gate = jnp.minimum(gate, LIMIT)
            up = jnp.maximum(jnp.minimum(up, LIMIT), -LIMIT) + 1
            exponent = STEEPNESS * gate
    return up * gate / (1 + jnp.exp(-exponent))
