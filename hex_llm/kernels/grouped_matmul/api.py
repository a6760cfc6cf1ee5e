"""The experts of a layer: which implementation, where."""

from typing import Any

from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.hopper import is_hopper
from hex_llm.kernels.quant_matmul.weight import Matrix
from hex_llm.parallel.backend import backend


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
    """[n, T or more, D], to be added; the sum of its first T rows is `reference.experts`."""
    run = _implementation(x, gate_up, down)
    return run(x, gate_up, gate_up_bias, down, chosen, share, activation=activation)


def _implementation(x: Array, gate_up: Matrix, down: Matrix) -> Any:
    # Imported where it is used: Pallas takes a second, which a start on a CPU has better use for.
    if is_hopper():
        from hex_llm.kernels.grouped_matmul import gpu

        if gpu.supports(x, gate_up, down):
            return gpu.experts
    if backend() == "tpu":
        from hex_llm.kernels.grouped_matmul import tpu, tpu_quant

        for each in (tpu, tpu_quant):
            if each.supports(x, gate_up, down):
                return each.experts
    from hex_llm.kernels.grouped_matmul import xla

    return xla.experts
