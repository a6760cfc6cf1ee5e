"""What adapters add to a product: which implementation, where."""

from jax import Array

from hex_llm.kernels.lora_matmul import xla
from hex_llm.kernels.lora_matmul.weight import Pairs


def lora_matmul(x: Array, pairs: Pairs, own: Array) -> Array:
    """[T or more, in] -> [T, out] float32: as `reference.lora_matmul`."""
    return xla.lora_matmul(x, pairs, own)
