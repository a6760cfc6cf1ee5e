"""Root-mean-square normalisation, and the stream of tokens that it stands in."""

from jax import Array

from hex_llm.kernels.matmul import api, reference
from hex_llm.kernels.matmul.reference import rms_norm
from hex_llm.pytree import pytree

__all__ = ["Stream", "add_rms_norm", "rms_norm", "value"]


@pytree
class Stream:
    """The tokens between two layers. What is still to be added to them comes in parts, as a product leaves it: the
    kernel that normalises next adds them on its way."""

    x: Array  # [T, D]
    parts: Array | None = None  # [n, T or more, D]


def value(stream: Stream) -> Array:
    """[T, D]"""
    x, parts = stream.x, stream.parts
    return x if parts is None else x + reference.total(parts)[: x.shape[0]].astype(x.dtype)


def add_rms_norm(stream: Stream, weight: Array, eps: float) -> tuple[Array, Array]:
    """The stream's value [T, D], and its norm: [T, D], or in more rows, of which those past T mean nothing."""
    if stream.parts is None:
        return stream.x, rms_norm(stream.x, weight, eps)
    return api.add_norm(stream.x, stream.parts, weight, eps)
