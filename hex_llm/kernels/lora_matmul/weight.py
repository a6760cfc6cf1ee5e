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
class Own:
    """Whose pairs are a token's: none, for one of the model alone."""

    slot: Array  # [T] int32: 1 is the first, 0 is none. Kernels read it before the one in front of them has ended
    mask: Array  # [T, slots] of 0 and 1

    @property
    def tokens(self) -> int:
        return self.slot.shape[0]


@pytree
class Adapted:
    """A weight, and what each token adds to it."""

    weight: Matrix  # [out, in]
    pairs: Pairs
    own: Own

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape
