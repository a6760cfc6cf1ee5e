"""The layout "hopper": codes in the order in which the threads of a warpgroup hand them to the tensor cores.

A tile is 64 rows by 128 columns, of which a warpgroup takes 64 columns, a chunk, at a time. `data` is [..., out / 64,
in / 128, lines, 128] int32: each thread finds what it needs of a chunk in 16 bytes, or twice that, beside those of its
neighbours, and has nothing to exchange with them.

Where a row has one scale and no zero, `scale` is that, [..., out, 1] float32, for the sums of the row. Else it is
[..., out / 64, in / 128, words, 64] int32: of each row of a tile the bfloat16 numbers of its groups, two in a word. Of
whole numbers these are a group's scale and zero, of others the scales of two groups. Groups are of 32, 64 or 128
columns; larger ones are repeated, and of a table those of 128, too. Scales are rounded to bfloat16, for a kernel
multiplies in that.

The decoder makes 1/64 of a whole number, less its zero, in one instruction (`gpu_decode`). So scales of those are 64
times as large here, zeros are a negative 64th, and 8-bit codes are without a sign, counted from -128.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, HOPPER_ROWS, TABLES, Codes, Coding, Packed, bits

THREADS = 128  # of a warpgroup
VECTOR = 4  # words that a thread loads at once
LINE = 128  # words
CHUNK = 64  # columns
CHUNKS = HOPPER_COLUMNS // CHUNK
WHOLE = ("int8", "int4")  # codings of whole numbers, which have zeros
SMALLER = 64  # by so much a decoded whole number is

# Axes of a tile's codes in the order of rows and columns: as wgmma wants its left operand of 16 bits.
_ROWS = (4, 2, 8)  # warp, half of its 16 rows, quarter of a warp
_COLUMNS = (8, 2, 4, 2)  # product of 16 columns, half of those, thread of a quarter, element of a register


class Grouping(NamedTuple):
    """Which groups a tile's scales are those of."""

    groups: int  # of a row of a tile
    has_zeros: bool

    @property
    def words(self) -> int:
        return self.groups if self.has_zeros else self.groups // 2


def chunk_lines(coding: Coding) -> int:
    """Lines of the codes of a chunk."""
    return HOPPER_ROWS * CHUNK * bits(coding) // 32 // LINE


def supports(codes: Codes) -> bool:
    """Whether a weight can lie so."""
    *_, out, size = codes.shape
    known = codes.coding in WHOLE or codes.coding in TABLES or (codes.coding == "fp8" and not _one_per_row(codes))
    if not known or not out or not size or out % HOPPER_ROWS or size % HOPPER_COLUMNS:
        return False
    group = size // codes.scale.shape[-1]
    return _one_per_row(codes) or group in (32, 64) or group % HOPPER_COLUMNS == 0


def pack(codes: Codes) -> Packed:
    if not supports(codes):
        raise ValueError(
            f"a weight {codes.shape} of {codes.coding} with {codes.scale.shape[-1]} groups cannot lie so: it takes "
            f"multiples of {HOPPER_ROWS} rows and {HOPPER_COLUMNS} columns, and groups of 32, 64 or a multiple of 128"
        )
    return Packed(
        data=_pack_codes(codes.codes, codes.coding),
        scale=_scale_factor(codes.coding) * codes.scale.astype(jnp.float32)
        if _one_per_row(codes)
        else _pack_scales(codes),
        zero=None,
        order=codes.order,
        input_scale=codes.input_scale,
        coding=codes.coding,
        layout="hopper",
    )


def unpack(weight: Packed) -> Codes:
    """What `pack` was given, but for scales, which were rounded, and groups, which may be repeated."""
    one_per_row = grouping_of(weight) is None
    if one_per_row:
        scale, zero = weight.scale / _scale_factor(weight.coding), None
    else:
        scale, zero = unpack_scales(weight.scale, weight.coding)
    return Codes(
        codes=unpack_codes(weight.data, weight.coding),
        scale=scale,
        zero=zero,
        order=weight.order,
        input_scale=weight.input_scale,
        coding=weight.coding,
    )


def grouping_of(weight: Packed) -> Grouping | None:
    """None: one scale for each row."""
    if weight.scale.dtype == jnp.float32:
        return None
    words = weight.scale.shape[-2]
    has_zeros = weight.coding in WHOLE or weight.layout == "hopper8"
    return Grouping(words if has_zeros else 2 * words, has_zeros)


def unpack_codes(data: Array, coding: Coding) -> Array:
    """[..., out / 64, tiles, lines, 128] -> [..., out, in]: any number of whole chunks a tile."""
    *experts, rows, columns, lines, _ = data.shape
    words = data.reshape(*experts, rows, columns, -1, THREADS, VECTOR)
    words = jnp.moveaxis(words, -3, -2).reshape(*experts, rows, columns, THREADS, -1)
    steps = 4 * (lines // chunk_lines(coding))  # products of 16 columns
    shape = (*experts, rows, columns, *(4, 8, 4), steps, 2, 2, 2)
    shifts = _shifts(coding)
    codes = words.reshape(*words.shape, *(1,) * shifts.ndim) >> _of_rank(shifts, words.ndim + shifts.ndim)
    codes = (codes & ((1 << bits(coding)) - 1)).reshape(shape)
    axes = _axes(len(experts))
    codes = codes.transpose([axes.index(axis) for axis in range(len(axes))])
    codes = codes.reshape(*experts, rows * HOPPER_ROWS, columns * steps * 16)
    if coding == "fp8":
        return lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.float8_e4m3fn)
    return codes.astype(jnp.uint8) if bits(coding) == 4 else (codes - _first(coding)).astype(jnp.int8)


def unpack_scales(words: Array, coding: Coding) -> tuple[Array, Array | None]:
    """[..., out / 64, tiles, words, 64] -> scale and zero [..., out, groups]: any number of words a tile."""
    *experts, rows, _, _, _ = words.shape
    words = jnp.moveaxis(words, -1, -3)
    halves = jnp.stack([words << 16, words & ~0xFFFF], axis=-1)  # bfloat16 is the upper half of float32
    values = lax.bitcast_convert_type(halves, jnp.float32)
    if coding not in WHOLE:
        return values.reshape(*experts, rows * HOPPER_ROWS, -1), None
    scale, zero = (values[..., i].reshape(*experts, rows * HOPPER_ROWS, -1) for i in range(2))
    return scale / SMALLER, -SMALLER * zero - _first(coding)


def _pack_codes(codes: Array, coding: Coding) -> Array:
    *experts, out, size = codes.shape
    rows, columns = out // HOPPER_ROWS, size // HOPPER_COLUMNS
    shape = (*experts, rows, *_ROWS, columns, *_COLUMNS)
    if coding == "fp8":
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    codes = codes.astype(jnp.int32) + _first(coding)
    fragments = codes.reshape(shape).transpose(_axes(len(experts)))
    fragments = fragments & ((1 << bits(coding)) - 1)
    shifts = _shifts(coding)
    shifted = fragments << _of_rank(shifts, fragments.ndim)
    words = jnp.sum(shifted, axis=tuple(range(-shifts.ndim, 0)), dtype=jnp.int32)
    words = words.reshape(*experts, rows, columns, THREADS, -1, VECTOR)
    return jnp.moveaxis(words, -3, -2).reshape(*experts, rows, columns, -1, LINE)


def _axes(experts: int) -> list[int]:
    """From [experts, rows, *_ROWS, columns, *_COLUMNS] to [experts, rows, columns, thread, code of the thread]."""
    rows, warp, half, quarter, columns, step, eight, lane, element = range(experts, experts + 9)
    return [*range(experts), rows, columns, warp, quarter, lane, step, eight, half, element]


def _shifts(coding: Coding) -> Array:
    """Of the codes in a word: of (half of 16 columns, half of rows, element), of 8 bits without the first."""
    if bits(coding) == 8:
        return 8 * jnp.arange(4).reshape(2, 2)
    pair = jnp.arange(4).reshape(2, 2, 1)  # what shares a register, in the order of registers
    element = jnp.arange(2).reshape(1, 1, 2)
    if coding in TABLES:  # one after the other: a table is looked up with four at a time
        return 4 * (2 * pair + element)
    return 4 * pair + 16 * element  # the second of a pair in the upper half, as it is in a register


def _of_rank(values: Array, rank: int) -> Array:
    return values.reshape((1,) * (rank - values.ndim) + values.shape)


def _one_per_row(codes: Codes) -> bool:
    return codes.scale.shape[-1] == 1 and codes.zero is None


def _pack_scales(codes: Codes) -> Array:
    *experts, out, groups = codes.scale.shape
    columns = codes.shape[-1] // HOPPER_COLUMNS
    has_zeros = codes.coding in WHOLE
    fewest = columns * (1 if has_zeros else 2)

    def repeated(values: Array) -> Array:
        """[..., out, in / 128, groups of a tile]"""
        values = jnp.repeat(values, max(1, fewest // groups), axis=-1)
        return _bits(values).reshape(*experts, out, columns, -1)

    halves = repeated(_scale_factor(codes.coding) * codes.scale)
    if has_zeros:
        zero = jnp.zeros_like(codes.scale) if codes.zero is None else codes.zero
        zero = repeated((zero + _first(codes.coding)) / -SMALLER)
        halves = jnp.stack([halves, zero], axis=-1).reshape(*experts, out, columns, -1)
    words = lax.bitcast_convert_type(halves[..., 0::2] | halves[..., 1::2] << 16, jnp.int32)
    words = words.reshape(*experts, out // HOPPER_ROWS, HOPPER_ROWS, columns, -1)
    return jnp.moveaxis(words, -3, -1)


def _first(coding: Coding) -> int:
    """What is added to a code, so that the first one is 0."""
    return 128 if coding == "int8" else 0


def _scale_factor(coding: Coding) -> int:
    return SMALLER if coding in WHOLE else 1


def _bits(values: Array) -> Array:
    return lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
