"""Rotary position embedding, and the ways in which models stretch it beyond the context they were trained with.

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
class YarnScaling:
    """As Llama 3's, but the blend runs evenly over the numbers of the waves, and queries and keys grow a little."""

    factor: float
    original_max_position: int
    fast_turns: float  # waves with more turns than this in the original context are kept
    slow_turns: float  # waves with fewer than this are slowed
    whole: bool  # the blend begins and ends at whole wave numbers
    amplitude: float

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        # Frequencies fall geometrically, so the number of a wave is a logarithm of its turns.
        step = math.log(frequencies[0] / frequencies[1]) if len(frequencies) > 1 else 1.0

        def wave(turns: float) -> float:
            return math.log(self.original_max_position / (turns * 2 * math.pi)) / step

        first, last = wave(self.fast_turns), wave(self.slow_turns)
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
        slowed = np.clip((np.arange(len(frequencies)) - first) / max(last - first, 1e-3), 0.0, 1.0)
        return (1 - slowed) * frequencies + slowed * frequencies / self.factor


@dataclass(frozen=True, slots=True)
class LongScaling:
    """Each wave is slowed by a factor of its own: by one list in short sequences, by another in those beyond the
    original context. A sequence that grows beyond it is computed anew."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    amplitude: float

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """[2, H/2]: for short and for long sequences."""
        return frequencies / np.array([self.short, self.long])


type Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class Rope:
    head_dim: int
    theta: float
    scaling: Scaling | None = None

    def frequencies(self) -> np.ndarray:
        """[H/2] angles per position, or two such rows where long sequences have their own."""
        exponents = np.arange(0, self.head_dim, 2) / self.head_dim
        frequencies = self.theta**-exponents
        if self.scaling is not None:
            frequencies = self.scaling.scale(frequencies)
        return frequencies.astype(np.float32)


def rope_tables(rope: Rope, positions: Array, long: Array | None = None) -> tuple[Array, Array]:
    """[T] positions -> cosines and sines, each [T, 1, H/2] float32: computed once per step, used by all layers.

    `long` [T] says which tokens belong to a long sequence; None: none does.
    """
    frequencies = jnp.asarray(rope.frequencies())
    if frequencies.ndim == 1:
        own = frequencies[None, :]
    else:
        own = frequencies[:1] if long is None else jnp.where(long[:, None], frequencies[1:], frequencies[:1])
    # bfloat16 would round position 257 to 256, and the fastest wave turns by a whole radian between them.
    angles = (positions.astype(jnp.float32)[:, None] * own)[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if isinstance(rope.scaling, YarnScaling | LongScaling):
        cos, sin = cos * rope.scaling.amplitude, sin * rope.scaling.amplitude
    return cos, sin
