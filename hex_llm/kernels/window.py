"""How far back a token sees."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """The last `size` tokens, itself among them; chunked, those since the last position that `size` divides."""

    size: int
    chunked: bool = False

    def first(self, position: Array) -> Array:
        """The first position that a token sees."""
        if self.chunked:
            return position - position % self.size
        return jnp.maximum(position - (self.size - 1), 0)
