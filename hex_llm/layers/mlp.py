"""The gated feed-forward part of a layer."""

import jax
from jax import Array

from hex_llm.kernels.matmul import api
from hex_llm.layers.linear import linear, linear_parts


def gated_mlp(
    x: Array,
    gate_up: Array,
    down: Array,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
) -> Array:
    """[T, D] -> [n, T or more, D], to be added; `gate_up` [2F, D] has the gate's rows first, `down` is [D, F]."""
    if gate_up_bias is None and api.takes(x, gate_up, gated=True):
        hidden = api.gated_matmul(x, gate_up)
    else:
        both = linear(x, gate_up, gate_up_bias)
        size = both.shape[1] // 2
        hidden = jax.nn.silu(both[:, :size]) * both[:, size:]
    return linear_parts(hidden, down, down_bias)
