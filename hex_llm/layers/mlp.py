"""The gated feed-forward part of a layer."""

import jax
from jax import Array

from hex_llm.layers.linear import linear


def gated_mlp(
    x: Array,
    gate_up: Array,
    down: Array,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
) -> Array:
    """[T, D] -> [T, D]; `gate_up` [2F, D] has the gate's rows first, `down` is [D, F]."""
    both = linear(x, gate_up, gate_up_bias)
    size = both.shape[1] // 2
    return linear(jax.nn.silu(both[:, :size]) * both[:, size:], down, down_bias)
