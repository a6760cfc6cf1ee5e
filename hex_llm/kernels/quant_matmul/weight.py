"""A weight in few bits: what its numbers are, and how they lie.

`Codes` says what the numbers are, one code for each: that is what formats of checkpoints are read into, whichever they
are. `Packed` is a weight as a kernel takes it. `layouts.pack` makes one of the other, once, when a model is loaded.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from jax import Array, lax

from hex_llm.pytree import pytree, static

# What a code stands for. Of whole numbers, int8 is from -128 to 127 and int4 from 0 to 15, and the code of zero is
# subtracted; the others of 4 bits are places in a table; fp8 are numbers already, and multiply tokens in fp8. w8a8 is
# int8 with one scale for each row and without zeros, and multiplies tokens in int8; w4a8 is int4 with tokens in fp8.
type Coding = Literal["int8", "int4", "nf4", "fp4", "mxfp4", "fp8", "w8a8", "w4a8"]
_NUMBERS: dict[Coding, Coding] = {"w8a8": "int8", "w4a8": "int4"}
W4A8_COLUMNS = 128  # groups of w4a8 have a multiple of these: each has a sum of its own, which its scale multiplies

# How codes lie: in rows and columns, two of 4 bits in a byte, the first in its low half; or as `gpu_layout` says,
# `gpu_w4a8_layout`, or `tpu_layout`.
type Layout = Literal["plain", "hopper", "hopper8", "tpu"]

_MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (0.0, 0.0625 / 12, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
TABLES: dict[str, np.ndarray] = {
    "nf4": np.array(
        [
            -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
        ],
        np.float32,
    ),
    "fp4": np.array([*_FP4, *(-value for value in _FP4)], np.float32),
    "mxfp4": np.array([*_MXFP4, *(-value for value in _MXFP4)], np.float32),
}  # fmt: skip


@pytree
class Codes:
    """A weight [..., out, in]: (code - zero) * scale, or its table's number of the code * scale."""

    codes: Array  # [..., out, in]: int8; uint8 of 0 to 15; or float8_e4m3fn
    scale: Array  # [..., out, groups] float32: groups of a row's columns, of one size, that follow each other
    zero: Array | None  # [..., out, groups] float32, whole numbers; None: 0
    order: Array | None  # [in] int32: the place in `x` of each column; None: the same
    input_scale: Array | None  # [] float32, of fp8, w8a8 and w4a8: by which `x` is divided; None: found for each token
    coding: Coding = static()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


@pytree
class Packed:
    """A weight [..., out, in] as a kernel takes it. Those before the last two of its dimensions are experts.

    Where devices share it, `data`, `scale` and `zero` are split along the dimensions that stand for `out` and for `in`,
    which come first in each.
    """

    data: Array
    scale: Array
    zero: Array | None
    order: Array | None
    input_scale: Array | None
    coding: Coding = static()
    layout: Layout = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that it stands for."""
        match self.layout:
            case "plain":
                *experts, out, size = self.data.shape
                return *experts, out, size if bits(self.coding) == 8 else 2 * size
            case "hopper" | "hopper8":
                *experts, rows, columns, _, _ = self.data.shape
                return *experts, rows * HOPPER_ROWS, columns * HOPPER_COLUMNS
            case "tpu":
                *experts, rows, columns, words, _ = self.data.shape
                return *experts, rows * TPU_ROWS, columns * words * (32 // bits(self.coding))


HOPPER_ROWS, HOPPER_COLUMNS = 64, 128  # of a tile in the layout of that name
TPU_ROWS, TPU_WORDS = 128, 8  # of a tile in that one: rows of the weight, and words of 32 bits of each


def of_expert[W: (Codes, Packed)](weight: W, expert: Array) -> W:
    """The weight [out, in] of one of its experts. Their order of columns and the scale of what comes in are one."""
    own = {name: getattr(weight, name, None) for name in ("codes", "data", "scale", "zero")}
    parts = {
        name: lax.dynamic_index_in_dim(array, expert, keepdims=False)
        for name, array in own.items()
        if array is not None
    }
    return replace(weight, **parts)


def numbers_of(coding: Coding) -> Coding:
    """The coding with the same codes for tokens that stay as they are."""
    return _NUMBERS.get(coding, coding)


def bits(coding: Coding) -> int:
    return 8 if numbers_of(coding) in ("int8", "fp8") else 4


type Matrix = Array | Packed  # [out, in], or with experts in front
