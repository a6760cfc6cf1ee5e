"""The gated feed-forward part of a layer."""

from jax import Array

from hex_llm.kernels.activation import Activation, gated
from hex_llm.kernels.lora_matmul.weight import Adapted
from hex_llm.kernels.quant_matmul.rows import Tokens
from hex_llm.kernels.quant_matmul.weight import Matrix
from hex_llm.layers.linear import kernels_of, linear, linear_summed


def gated_mlp(
    x: Tokens,
    gate_up: Matrix | Adapted,
    down: Matrix | Adapted,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    *,
    activation: Activation = "silu",
) -> Array:
    """[T, D] -> [n, T or more, D], to be added; `gate_up` [2F, D] has the gate's rows first, `down` is [D, F]."""
    return linear_summed(gated_hidden(x, gate_up, gate_up_bias, activation=activation), down, down_bias)


def gated_hidden(
    x: Tokens, gate_up: Matrix | Adapted, gate_up_bias: Array | None = None, *, activation: Activation
) -> Array:
    """[T, D] -> [T or more, F]: what `down` multiplies."""
    if gate_up_bias is None:
        kernels = kernels_of(gate_up)
        if kernels.takes(x, gate_up, activation=activation):
            return kernels.gated_matmul(x, gate_up, activation)
    both = linear(x, gate_up, gate_up_bias)
    size = both.shape[1] // 2
    return gated(activation, both[:, :size], both[:, size:])
