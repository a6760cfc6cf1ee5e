"""The layout "hopper8": codes of 4 bits in the order in which the threads of a warpgroup hand them to the tensor cores
as numbers of 8 bits.

A tile is 64 rows by 128 columns. `data` is [out / 64, in / 128, 8, 128] int32: each thread finds what it needs of a
tile in twice 16 bytes, beside those of its neighbours, and has nothing to exchange with them. A byte of a word has two
codes, of rows that are 8 apart.

`scale` is [out / 64, in / 128, 1, 64] int32: of each row of a tile a float32 number whose last bits are the zero, 0 to
31, and the others the scale, as many as float16 and bfloat16 have, and more. Scales are 512 times as large here, since
a code, taken for a float8_e4m3fn number, is a 512th of itself.
"""

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.quant_matmul.gpu_layout import LINE, THREADS, VECTOR
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, HOPPER_ROWS, Codes, Packed

LINES = HOPPER_ROWS * HOPPER_COLUMNS // 8 // LINE  # of a tile's codes, eight to a word
SMALLER = 512  # by so much a number is, as the tensor cores take it
ZERO_BITS = 5  # of a word of `scale`, the last ones
LARGEST_ZERO = 2**ZERO_BITS - 1
_MANTISSA = 23 - ZERO_BITS  # bits that a scale has

# Axes of a tile's codes in the order of rows and columns: as wgmma wants its left operand of 8 bits.
_ROWS = (4, 2, 8)  # warp, half of its 16 rows, quarter of a warp
_COLUMNS = (8, 4, 4)  # 16 columns, thread of a quarter, element of a register


def supports(codes: Codes) -> bool:
    """Whether a weight can lie so."""
    if codes.coding != "w4a8" or codes.order is not None or len(codes.shape) != 2:
        return False
    out, size = codes.shape
    groups = codes.scale.shape[-1]
    is_grouped = groups == 1 or size // groups % HOPPER_COLUMNS == 0
    return bool(out and size) and out % HOPPER_ROWS == 0 and size % HOPPER_COLUMNS == 0 and is_grouped


def pack(codes: Codes) -> Packed:
    if not supports(codes):
        raise ValueError(
            f"a weight {codes.shape} of {codes.coding} with {codes.scale.shape[-1]} groups cannot lie so: it takes "
            f"multiples of {HOPPER_ROWS} rows and {HOPPER_COLUMNS} columns, and groups of a multiple of those"
        )
    return Packed(
        data=_pack_codes(codes.codes),
        scale=_pack_scales(codes),
        zero=None,
        order=None,
        input_scale=codes.input_scale,
        coding=codes.coding,
        layout="hopper8",
    )


def unpack(weight: Packed) -> Codes:
    """What `pack` was given, but for groups, which may be repeated."""
    scale, zero = unpack_scales(weight.scale)
    return Codes(
        codes=unpack_codes(weight.data),
        scale=scale / SMALLER,
        zero=zero,
        order=None,
        input_scale=weight.input_scale,
        coding=weight.coding,
    )


def scale_and_zero(words: Array) -> tuple[Array, Array]:
    """Of each word the scale, for numbers that are a 512th of codes, and the zero, both float32. For kernels, too."""
    return lax.bitcast_convert_type(words & ~LARGEST_ZERO, jnp.float32), (words & LARGEST_ZERO).astype(jnp.float32)


def unpack_scales(words: Array) -> tuple[Array, Array]:
    """[out / 64, tiles, 1, 64] -> scale, for such numbers, and zero [out, tiles]."""
    rows, columns, _, _ = words.shape
    words = words.reshape(rows, columns, HOPPER_ROWS).swapaxes(1, 2).reshape(-1, columns)
    return scale_and_zero(words)


def unpack_codes(data: Array) -> Array:
    """[out / 64, tiles, 8, 128] -> [out, in] uint8."""
    rows, columns, *_ = data.shape
    words = data.reshape(rows, columns, -1, THREADS, VECTOR).swapaxes(2, 3).reshape(rows, columns, *_THREAD, -1)
    codes = (
        words[..., None, None] >> _shifts(words.ndim + 2)
    ) & 15  # [..., warp, quarter, lane, sixteen, half, element]
    codes = codes.transpose(0, 2, 6, 3, 1, 5, 4, 7)
    return codes.reshape(rows * HOPPER_ROWS, columns * HOPPER_COLUMNS).astype(jnp.uint8)


_THREAD = (4, 8, 4)  # warp, quarter of it, thread of that


def _pack_codes(codes: Array) -> Array:
    rows, columns = codes.shape[0] // HOPPER_ROWS, codes.shape[1] // HOPPER_COLUMNS
    parts = codes.astype(jnp.int32).reshape(rows, *_ROWS, columns, *_COLUMNS)
    parts = parts.transpose(0, 4, 1, 3, 6, 5, 2, 7)  # [rows, columns, warp, quarter, lane, sixteen, half, element]
    words = jnp.sum(parts << _shifts(parts.ndim), axis=(-2, -1), dtype=jnp.int32)
    words = words.reshape(rows, columns, THREADS, -1, VECTOR).swapaxes(2, 3)
    return words.reshape(rows, columns, LINES, LINE)


def _shifts(ndim: int) -> Array:
    """Of the codes in a word: of (half of the rows, element), the last two of so many dimensions."""
    half, element = (lax.broadcasted_iota(jnp.int32, (1,) * (ndim - 2) + (2, 4), ndim - 2 + axis) for axis in (0, 1))
    return 4 * half + 8 * element


def _pack_scales(codes: Codes) -> Array:
    groups = codes.scale.shape[1]
    columns = codes.shape[1] // HOPPER_COLUMNS

    def of_tiles(values: Array) -> Array:
        values = jnp.repeat(values, columns // groups, axis=1).reshape(-1, HOPPER_ROWS, columns)
        return values.swapaxes(1, 2)[:, :, None]

    zero = jnp.zeros_like(codes.scale) if codes.zero is None else codes.zero
    scale = jnp.where(jnp.isnan(zero), zero, codes.scale)  # what cannot be told stays so
    scale = lax.reduce_precision(scale * SMALLER, exponent_bits=8, mantissa_bits=_MANTISSA)
    bits = lax.bitcast_convert_type(scale, jnp.int32) & ~LARGEST_ZERO
    return of_tiles(bits | zero.astype(jnp.int32) & LARGEST_ZERO)
