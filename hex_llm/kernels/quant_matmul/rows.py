"""Tokens in 8 bits, as a product with an fp8 weight takes them, and how it takes them."""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.quant_matmul.weight import Packed
from hex_llm.pytree import pytree, static


@pytree
class Fp8:
    """That tokens are to come in float8_e4m3fn: divided by this scale [], or each by its own."""

    input_scale: Array | None


@pytree
class Rows:
    """Tokens [M, in] that are there in float8_e4m3fn: their numbers are `values * scale`."""

    values: Array  # [M, in]
    scale: Array  # [M] float32
    type_name: str = static()  # of the tokens that they were made of

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """That in which a product with them is given."""
        return jnp.dtype(self.type_name)


type Tokens = Array | Rows


def taken_by(weight: Packed) -> Fp8:
    """How an fp8 weight takes its tokens."""
    return Fp8(weight.input_scale)
