"""The experts of a layer on Hopper: a kernel that reads fast for few tokens, one that multiplies fast for many."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.chain import MAX_TOKENS
from hex_llm.kernels.grouped_matmul import gpu_few, gpu_many, gpu_many_codes
from hex_llm.kernels.hopper import MMA_ROWS
from hex_llm.kernels.quant_matmul.weight import Matrix, Packed

# With more it takes longer to multiply all tokens with every expert than to read these.
MAX_TOKENS_OF_CODES = 64


def supports(x: Array, gate_up: Matrix, down: Matrix) -> bool:
    """Whether there are kernels for these types and sizes."""
    width, size = down.shape[1], gate_up.shape[1] // 2
    if x.dtype != jnp.bfloat16 or not width or not size or width % MMA_ROWS or size % MMA_ROWS:
        return False
    if isinstance(gate_up, Packed) and isinstance(down, Packed):
        return gate_up.layout == down.layout == "hopper"
    return not isinstance(gate_up, Packed) and not isinstance(down, Packed) and gate_up.dtype == down.dtype == x.dtype


def experts(
    x: Array,
    gate_up: Matrix,
    gate_up_bias: Array | None,
    down: Matrix,
    chosen: Array,
    share: Array,
    *,
    activation: Activation,
) -> Array:
    """As `reference.experts`, in parts [n, T or more, D]."""
    run = _for_few_or_many(chosen.shape[0], gate_up)
    return run(x, gate_up, gate_up_bias, down, chosen, share, activation=activation)


def _for_few_or_many(tokens: int, weight: Matrix) -> Any:
    if isinstance(weight, Packed):
        return gpu_few.experts if tokens <= MAX_TOKENS_OF_CODES else gpu_many_codes.experts
    return gpu_few.experts if tokens <= MAX_TOKENS else gpu_many.experts
