"""Whole numbers in words of 32 bits, as they become codes."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from hex_llm.kernels.quant_matmul.weight import Codes, Coding, bits

WORD = 32
INT32 = (np.dtype(np.int32),)
CODINGS: dict[int, Coding] = {4: "int4", 8: "int8"}  # by bits, of tokens that stay as they are


def per_word(bits: int) -> int:
    return WORD // bits


def unpack(words: Array, bits: int, places: Sequence[int] | None = None) -> Array:
    """[...] -> [..., numbers of a word] int32, from 0 on. `places` says where in a word each is, counted from its
    lowest bits; None: one after the other."""
    shifts = bits * np.asarray(range(per_word(bits)) if places is None else places, np.int32)
    return words[..., None] >> np.expand_dims(shifts, tuple(range(words.ndim))) & (1 << bits) - 1


def unsigned(codes: Array, scale: Array, zero: Array | None, coding: Coding) -> Codes:
    """Codes of numbers [out, in] from 0 on, with scales and zeros [out, groups]; None: the middle stands for zero."""
    middle = 1 << bits(coding) - 1
    scale = scale.astype(jnp.float32)
    if bits(coding) == 4:
        codes = codes.astype(jnp.uint8)
        zero = jnp.full(scale.shape, middle) if zero is None else zero
    else:
        codes = (codes - middle).astype(jnp.int8)
        zero = None if zero is None else zero - middle
    zero = None if zero is None else zero.astype(jnp.float32)
    return Codes(codes, scale, zero, order=None, input_scale=None, coding=coding)
