"""Rotary position embedding, with the frequency scalings of the Llama family.

Heads are rotated in Hugging Face's layout: dimension i of a head turns together with dimension i + H/2.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are squeezed by a factor."""

    factor: float

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow waves are slowed by a factor, fast ones are kept, those between are a blend of both."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_max_position * frequencies / (2 * math.pi)  # within the original context
        # Equal factors leave no room for a blend, and must not divide by zero.
        span = max(self.high_freq_factor - self.low_freq_factor, 1e-9)
        kept = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Rope:
    head_dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None

    def frequencies(self) -> np.ndarray:
        """[H/2] angles per position."""
        exponents = np.arange(0, self.head_dim, 2) / self.head_dim
        frequencies = self.theta**-exponents
        if self.scaling is not None:
            frequencies = self.scaling.scale(frequencies)
        return frequencies.astype(np.float32)


def rope_tables(rope: Rope, positions: Array) -> tuple[Array, Array]:
    """[T] positions -> cosines and sines, each [T, 1, H/2] float32: computed once per step, used by all layers."""
    # bfloat16 would round position 257 to 256, and the fastest wave turns by a whole radian between them.
    angles = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(rope.frequencies())[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)
