"""The experts of a layer on Hopper: a kernel that reads fast for few tokens, one that multiplies fast for many."""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.chain import MAX_TOKENS
from hex_llm.kernels.grouped_matmul import gpu_few, gpu_many
from hex_llm.kernels.hopper import MMA_ROWS


def supports(x: Array, gate_up: Array, down: Array) -> bool:
    """Whether there are kernels for these types and sizes."""
    _, width, size = down.shape
    typed = x.dtype == gate_up.dtype == down.dtype == jnp.bfloat16
    return typed and width > 0 and size > 0 and width % MMA_ROWS == 0 and size % MMA_ROWS == 0


def experts(
    x: Array,
    gate_up: Array,
    gate_up_bias: Array | None,
    down: Array,
    chosen: Array,
    share: Array,
    *,
    activation: Activation,
) -> Array:
    """As `reference.experts`, in parts [n, T or more, D]."""
    run = gpu_few.experts if chosen.shape[0] <= MAX_TOKENS else gpu_many.experts
    return run(x, gate_up, gate_up_bias, down, chosen, share, activation=activation)
