"""A weight that adapters change: what each of them adds to it is a product of two narrow matrices, a pair."""

from jax import Array

from hex_llm.kernels.quant_matmul.weight import Matrix
from hex_llm.pytree import pytree


@pytree
class Pairs:
    """Of each slot for adapters the pairs that belong to one weight [out, in]: those of its parts, whose rows follow
    each other. Zeros where an adapter leaves a part as it is, or has fewer than `rank` columns."""

    down: Array  # [parts, slots, rank, in]
    up: tuple[Array, ...]  # of each part [rows, slots, rank]


@pytree
class Adapted:
    """A weight, and what each token adds to it."""

    weight: Matrix  # [out, in]
    pairs: Pairs
    own: Array  # [T, slots] of 0 and 1: whose pairs are a token's; none, for one of the model alone

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape
