"""The gated feed-forward part of a layer."""

from jax import Array

from hex_llm.kernels.activation import Activation, gated
from hex_llm.kernels.matmul import api
from hex_llm.layers.linear import linear, linear_summed


def gated_mlp(
    x: Array,
    gate_up: Array,
    down: Array,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    *,
    activation: Activation = "silu",
) -> Array:
    """[T, D] -> [n, T or more, D], to be added; `gate_up` [2F, D] has the gate's rows first, `down` is [D, F]."""
    return linear_summed(gated_hidden(x, gate_up, gate_up_bias, activation=activation), down, down_bias)


def gated_hidden(x: Array, gate_up: Array, gate_up_bias: Array | None = None, *, activation: Activation) -> Array:
    """[T, D] -> [T or more, F]: what `down` multiplies."""
    if gate_up_bias is None and api.takes(x, gate_up, activation=activation):
        return api.gated_matmul(x, gate_up, activation)
    both = linear(x, gate_up, gate_up_bias)
    size = both.shape[1] // 2
    return gated(activation, both[:, :size], both[:, size:])
