"""From codes to bfloat16 in the registers of a warpgroup, by a few instructions for two numbers at a time.

The last 8 bits of a bfloat16 number with no others set count in 2^-133: what has no exponent and what has the smallest
are on one line. So a whole number is there as soon as the other bits are masked off, wherever it stands in those 8; one
multiplication makes 1/64 of it, as much as a bfloat16 factor can, and subtracts as much of a zero: exact. What is in a
table is looked up byte by byte. Then comes the one rounding, when a group's scale is multiplied with.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from hex_llm.kernels.hopper import INT8_PAIRS
from hex_llm.kernels.quant_matmul.gpu_layout import CHUNK, LINE, VECTOR, WHOLE, Grouping, chunk_lines
from hex_llm.kernels.quant_matmul.weight import HOPPER_ROWS, TABLES, Coding

ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
HALF_ROWS = 2  # a thread has numbers of two rows
# Twice the power of two that makes 64ths of each pair of a word: of whole numbers of 2^-133, and, with the upper 4 of
# the last 8 bits, of 2^-129.
FACTORS = {"int8": (0x7F007F00,), "int4": (0x7F007F00, 0x7D007D00)}
FIRST = {"int8": 0xC000C000, "int4": 0}  # twice what is added to 64ths where there is no zero: -2 is 128 less
LARGE = 0x7B807B80  # twice 2^120: by so much smaller is a bfloat16 number than one of 8 bits with the same exponent


def word_layout(coding: Coding) -> Any:
    """How the words of a chunk are to be loaded."""
    return plgpu.Layout.WG_STRIDED((chunk_lines(coding), LINE), VECTOR)


def words_of(grouping: Grouping, chunk: int) -> range:
    """Of the words of a tile's scales, those that a chunk needs."""
    if grouping.words == 1:
        return range(1)
    half = grouping.words // 2
    return range(chunk * half, (chunk + 1) * half)


def decode(words: Array, scales: tuple[Array, ...], coding: Coding, grouping: Grouping | None, chunk: int) -> Array:
    """[chunk_lines, 128] int32, and those of `words_of`, [64] int32 each -> [64, 64] bfloat16."""

    @plgpu.inline_mgpu(
        arg_types=(word_layout(coding), (ROW_LAYOUT,) * len(scales)),
        return_type=plgpu.ShapeDtypeStruct((HOPPER_ROWS, CHUNK), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def convert(_: Any, words: Any, scales: Any) -> Any:
        registers = [vector.extract(each, [], [i]) for each in words.registers.flat for i in range(VECTOR)]
        numbers = [number for word in registers for number in _numbers(word, coding)]
        groups = _groups([_rows(each) for each in scales], grouping, chunk)
        if coding == "fp8":
            groups = [
                [(_asm(f"mov.b32 a, {LARGE}; mul.bf16x2 $0, $1, a;", scale), zero) for scale, zero in rows]
                for rows in groups
            ]
        span = len(numbers) // len(groups)
        places = [groups[i // span][i % HALF_ROWS] for i in range(len(numbers))]
        if coding in WHOLE:
            factors = FACTORS[coding]
            numbers = [
                _less(number, factors[i % len(factors)], zero, coding)
                for i, (number, (_, zero)) in enumerate(zip(numbers, places, strict=True))
            ]
        if grouping is not None:
            numbers = [
                _asm("mul.bf16x2 $0, $1, $2;", number, scale)
                for number, (scale, _) in zip(numbers, places, strict=True)
            ]
        return operand(numbers)

    return convert(words, scales)  # pyright: ignore[reportCallIssue]


def _numbers(word: Any, coding: Coding) -> list[Any]:
    """Of a word the pairs of bfloat16 numbers, in the order of registers; of whole ones as `FACTORS` expects them."""
    match coding:
        case "int8":
            return [_asm(f"prmt.b32 $0, $1, 0, {which};", word) for which in INT8_PAIRS]
        case "int4":
            upper = _asm("shr.u32 $0, $1, 8;", word)
            return [
                _asm(f"and.b32 $0, $1, {mask};", half) for half in (word, upper) for mask in (0x000F000F, 0x00F000F0)
            ]
        case "fp8":
            # The bits of a number are those of a bfloat16 one with a smaller exponent: what lacks is in the scales.
            text = (
                "prmt.b32 a, $1, 0, {}; shr.u32 b, a, 4; and.b32 a, a, 0x80008000; lop3.b32 $0, b, 0x07f007f0, a, 0xea;"
            )
            return [_asm(text.format(which), word) for which in (0x1404, 0x3424)]
        case _:
            return [number for half in range(2) for number in _looked_up(word, 16 * half, coding)]


def _looked_up(word: Any, shift: int, coding: Coding) -> list[Any]:
    """Of the four codes from bit `shift` on, the two pairs. An instruction looks up four bytes among eight, so each of
    a number's bytes is looked up in both halves of the table, and then the right half's is taken."""
    table = TABLES[coding].astype(jnp.bfloat16).view(np.uint16)
    codes = _asm(f"shr.u32 $0, $1, {shift};", word) if shift else word
    place = _asm("and.b32 $0, $1, 0x7777;", codes)
    which = _asm("shr.u32 a, $1, 1; lop3.b32 $0, a, 0x4444, 0x3210, 0xea;", codes)
    planes = []
    for byte in range(2):
        pool = (table >> (8 * byte) & 255).astype(np.uint8).view("<u4")
        halves = [
            _asm(f"mov.b32 a, {pool[i]}; mov.b32 b, {pool[i + 1]}; prmt.b32 $0, a, b, $1;", place) for i in (0, 2)
        ]
        planes.append(_asm("prmt.b32 $0, $1, $2, $3;", *halves, which))
    return [_asm(f"prmt.b32 $0, $1, $2, {order};", *planes) for order in (0x5140, 0x7362)]


def _rows(scale: Any) -> list[Any]:
    """Of each of a thread's rows the word."""
    i32 = ir.IntegerType.get_signless(32)
    return [mgpu.utils.bitcast(each, i32) for each in scale.registers.flat]


def _groups(words: list[list[Any]], grouping: Grouping | None, chunk: int) -> list[list[tuple[Any, Any]]]:
    """(scale, zero), twice in a register, of each group of a chunk and each of a thread's rows; None where there is
    none."""

    def twice(word: Any, half: int) -> Any:
        return _asm(f"prmt.b32 $0, $1, $1, {(0x1010, 0x3232)[half]};", word)

    if grouping is None:
        return [[(None, None)] * HALF_ROWS]
    if grouping.has_zeros:
        return [[(twice(row, 0), twice(row, 1)) for row in rows] for rows in words]
    halves = (chunk,) if grouping.words == 1 else (0, 1)
    return [[(twice(row, half), None) for row in rows] for rows in words for half in halves]


def _less(number: Any, factor: int, zero: Any | None, coding: Coding) -> Any:
    """A 64th of what a whole number is more than its zero."""
    text = f"mov.b32 a, {factor}; fma.rn.bf16x2 $0, $1, a, {{}};"
    if zero is None:
        return _asm(f"mov.b32 b, {FIRST[coding]}; " + text.format("b"), number)
    return _asm(text.format("$2"), number, zero)


def operand(numbers: list[Any]) -> Any:
    """Registers in the order (8 columns, half of the rows), as wgmma's left operand."""
    layout = mgpu.WGMMA_LAYOUT
    registers = np.empty(layout.registers_shape((HOPPER_ROWS, CHUNK)), dtype=object)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    registers.flat[:] = [mgpu.utils.bitcast(number, pair) for number in numbers]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _asm(text: str, *operands: Any) -> Any:
    constraints = ",".join(["=r"] + ["r"] * len(operands))
    body = "{ .reg .b32 a, b, c; " + text + " }"
    return llvm.inline_asm(ir.IntegerType.get_signless(32), list(operands), body, constraints)
