"""Products with weights that adapters change: which implementation, where.

`takes`, `parts` and `gated_matmul` are those of a chain on Hopper. What is not taken is the weight's own product, and
`lora_matmul` beside it.
"""

from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.chain import chained
from hex_llm.kernels.lora_matmul import xla
from hex_llm.kernels.lora_matmul.weight import Adapted, Own, Pairs
from hex_llm.kernels.quant_matmul.rows import Rows, Tokens


def takes(x: Tokens, weight: Adapted, *, activation: Activation | None = None) -> bool:
    """Whether the product of x [T or more, in] with a weight [out, in], gated where there is one, is one of a chain."""
    if isinstance(x, Rows) or not chained(x.shape[0]):
        return False
    # Imported where it is used: Pallas takes a second, which a start on a CPU has better use for.
    from hex_llm.kernels.lora_matmul import gpu

    return gpu.supports(x, weight, activation=activation)


def parts(x: Array, weight: Adapted) -> Array:
    """[M, in] x [out, in] -> [n, M, out], to be added, with what adapters add; M grows to a multiple of 8."""
    from hex_llm.kernels.lora_matmul import gpu

    return gpu.parts(x, weight)


def gated_matmul(x: Array, weight: Adapted, activation: Activation) -> Array:
    """The same, gated: [M, in] x [2F, in] -> [M, F]."""
    from hex_llm.kernels.lora_matmul import gpu

    return gpu.parts(x, weight, activation=activation)[0]


def lora_matmul(x: Array, pairs: Pairs, own: Own) -> Array:
    """[T or more, in] -> [T, out] float32: as `reference.lora_matmul`."""
    return xla.lora_matmul(x, pairs, own)
