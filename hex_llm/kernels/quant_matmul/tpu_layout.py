"""The layout for TPUs: the weight turned, so that its rows lie along lanes, and several of its columns are in a word.

A tile is one vector register of words: [8, 128] int32 for 128 rows and 32 columns of 8 bits, or 64 of 4. The scale or
zero of a group is then a row of numbers that all columns of the group share, which costs least to multiply with. Tiles
of the same rows follow each other, so that a copy of some rows with all their columns is one piece of memory.

Codes are what a TPU turns into numbers with the fewest instructions:
- int4 is from -8 to 7, which all chips have an instruction for;
- fp8 and mxfp4 become float8_e4m3b11fnuz, the only float of 8 bits that v5e and v6e can read. Its numbers are smaller,
  by a power of two that is put into the scale; it has no -0, which is 0 here.
"""

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.quant_matmul.tpu_sizes import columns_at_once
from hex_llm.kernels.quant_matmul.weight import TPU_ROWS, TPU_WORDS, Codes, Coding, Packed, bits, numbers_of

NEGATIVE_ZERO = {"fp8": 0x80, "mxfp4": 8}
# What the number of a code is larger by than the one that a TPU reads: 2**(11 - 7), and 2**(11 - 1) for 2 bits of
# exponent at the low end of 4.
FACTOR: dict[str, float] = {"fp8": 2.0**4, "mxfp4": 2.0**10}
SMALLEST_GROUP = 16  # rows of bf16 in a register


def fits(codes: Codes) -> bool:
    """Whether the weight fills whole tiles, and groups whole registers."""
    *_, out, size = codes.shape
    groups = codes.scale.shape[-1]
    whole = out > 0 and size > 0 and out % TPU_ROWS == 0 and size % tile_columns(codes.coding) == 0
    grouped = size % groups == 0 and (groups == 1 or size // groups % SMALLEST_GROUP == 0)
    return whole and grouped and columns_at_once(size, groups) is not None


def tile_columns(coding: Coding) -> int:
    return TPU_WORDS * (32 // bits(coding))


def pack(codes: Codes) -> Packed:
    scale = codes.scale * FACTOR.get(codes.coding, 1.0)
    if codes.coding == "mxfp4":
        scale = scale.astype(jnp.bfloat16)  # a power of two
    return Packed(
        data=_words(codes),
        scale=_rows_last(scale),
        # A zero is a whole number: bfloat16 has all of those up to 256.
        zero=None if codes.zero is None else _rows_last(codes.zero.astype(jnp.bfloat16)),
        order=codes.order,
        input_scale=codes.input_scale,
        coding=codes.coding,
        layout="tpu",
    )


def unpack(weight: Packed) -> Codes:
    return Codes(
        codes=_codes(weight),
        scale=_rows_first(weight.scale).astype(jnp.float32) / FACTOR.get(weight.coding, 1.0),
        zero=None if weight.zero is None else _rows_first(weight.zero).astype(jnp.float32),
        order=weight.order,
        input_scale=weight.input_scale,
        coding=weight.coding,
    )


def _words(codes: Codes) -> Array:
    """[..., out, in] -> [..., out / 128, in / columns of a tile, 8, 128]."""
    data = codes.codes
    if data.dtype != jnp.uint8:
        data = jax.lax.bitcast_convert_type(data, jnp.uint8)
    if (negative_zero := NEGATIVE_ZERO.get(codes.coding)) is not None:
        data = jnp.where(data == negative_zero, 0, data)
    if numbers_of(codes.coding) == "int4":
        data = data ^ 8
    *experts, out, size = data.shape
    width = bits(codes.coding)
    shape = _tile_shape(codes.coding)
    data = data.reshape(*experts, out // TPU_ROWS, TPU_ROWS, size // tile_columns(codes.coding), *shape)
    place = _places(codes.coding)
    # [..., out / 128, tiles of columns, parts of a word, 8, 128]
    first = len(experts)
    data = data.transpose(*range(first), first, first + 2, *(first + 3 + i for i in place), first + 1)
    data = data.reshape(*experts, out // TPU_ROWS, size // tile_columns(codes.coding), 32 // width, TPU_WORDS, TPU_ROWS)
    words = jnp.zeros((*data.shape[:-3], TPU_WORDS, TPU_ROWS), jnp.uint32)
    for part in range(32 // width):
        words |= data[..., part, :, :].astype(jnp.uint32) << (part * width)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def _codes(weight: Packed) -> Array:
    coding, width = weight.coding, bits(weight.coding)
    words = jax.lax.bitcast_convert_type(weight.data, jnp.uint32)
    parts = [(words >> (part * width) & ((1 << width) - 1)).astype(jnp.uint8) for part in range(32 // width)]
    *experts, rows, columns, _, _ = words.shape
    first, place = len(experts), _places(coding)
    shape = _tile_shape(coding)
    data = jnp.stack(parts, axis=-3).reshape(*experts, rows, columns, *(shape[i] for i in place), TPU_ROWS)
    back = [first + 2 + place.index(i) for i in range(len(place))]
    data = data.transpose(*range(first), first, first + 2 + len(place), first + 1, *back)
    data = data.reshape(weight.shape)
    match numbers_of(coding):
        case "int4":
            return data ^ 8
        case "int8":
            return jax.lax.bitcast_convert_type(data, jnp.int8)
        case "fp8":
            return jax.lax.bitcast_convert_type(data, jnp.float8_e4m3fn)
        case _:
            return data


def _tile_shape(coding: Coding) -> tuple[int, ...]:
    """How the columns of a tile are counted: the dimensions that `_places` puts in another order."""
    match numbers_of(coding):
        case "int8" | "fp8":
            return TPU_WORDS, 4
        case "int4":
            return TPU_WORDS, 8
        case "mxfp4":  # the low halves of bytes, then the high ones
            return 2, TPU_WORDS, 4
        case _:
            return 8, TPU_WORDS


def _places(coding: Coding) -> tuple[int, ...]:
    """Of the dimensions of `_tile_shape`, which count the parts of a word, the least first last, and then the words."""
    match numbers_of(coding):
        case "int8" | "fp8" | "int4":
            return 1, 0
        case "mxfp4":
            return 2, 0, 1
        case _:
            return 0, 1


def _rows_last(values: Array) -> Array:
    """[..., out, groups] -> [..., out / 128, groups, 128]."""
    *experts, out, groups = values.shape
    return values.reshape(*experts, out // TPU_ROWS, TPU_ROWS, groups).swapaxes(-1, -2)


def _rows_first(values: Array) -> Array:
    *experts, rows, groups, _ = values.shape
    return values.swapaxes(-1, -2).reshape(*experts, rows * TPU_ROWS, groups)
