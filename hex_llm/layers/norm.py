"""Root-mean-square normalisation, and the stream of tokens that it stands in."""

from jax import Array

from hex_llm.kernels.lora_matmul.weight import Adapted
from hex_llm.kernels.matmul import api, reference
from hex_llm.kernels.quant_matmul.rows import Tokens
from hex_llm.kernels.quant_matmul.weight import Matrix
from hex_llm.kernels.rms import Rms, rms_norm
from hex_llm.layers.linear import taken_in_8_bits
from hex_llm.pytree import pytree


@pytree
class Stream:
    """The tokens between two layers. What is still to be added to them comes in parts, as a product leaves it: the
    kernel that normalises next adds them on its way."""

    x: Array  # [T, D]
    parts: Array | None = None  # [n, T or more, D]
    norm: Array | None = None  # [D]: the weight by which the sum of the parts is normalised before it is added


def value(stream: Stream, rms: Rms) -> Array:
    """[T, D]"""
    if stream.parts is None:
        return stream.x
    return reference.add(stream.x, stream.parts, rms, inner=stream.norm)


def add_rms_norm(
    stream: Stream, weight: Array, rms: Rms, *, behind: Matrix | Adapted | None = None
) -> tuple[Array, Tokens]:
    """The stream's value [T, D], and its norm: [T, D], or in more rows, of which those past T mean nothing.

    Where nothing but a product with the weight `behind` reads the norm, it may come in the few bits which that takes;
    adapters read it as it is.
    """
    if stream.parts is None:
        return stream.x, rms_norm(stream.x, weight, rms)
    eight_bits = None if behind is None else taken_in_8_bits(stream.x, behind)
    return api.add_norm(stream.x, stream.parts, weight, rms, inner=stream.norm, eight_bits=eight_bits)
