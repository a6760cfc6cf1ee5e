"""From codes to bfloat16 in the registers of a warpgroup, by a few instructions for two numbers at a time.

Whole numbers become the last bits of bfloat16 numbers whose exponent makes these count in ones, from which a constant
is subtracted: exact, as is what a zero leaves. What is in a table is looked up byte by byte. Then comes the one
rounding, when a group's scale is multiplied with.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from hex_llm.kernels.hopper import INT8_PAIRS, INT8_TO_BFLOAT16
from hex_llm.kernels.quant_matmul.gpu_layout import CHUNK, LINE, VECTOR, Grouping, chunk_lines
from hex_llm.kernels.quant_matmul.weight import HOPPER_ROWS, TABLES, Coding

ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
HALF_ROWS = 2  # a thread has numbers of two rows
ONES = 0x43004300  # twice 128, whose last 7 bits count in ones
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
        if grouping is None:
            if coding == "int4":
                numbers = [_asm(f"mov.b32 a, {ONES}; sub.bf16x2 $0, $1, a;", number) for number in numbers]
        else:
            groups = _groups([_rows(each) for each in scales], grouping, chunk)
            if coding == "fp8":
                groups = [
                    [(_asm(f"mov.b32 a, {LARGE}; mul.bf16x2 $0, $1, a;", scale), zero) for scale, zero in rows]
                    for rows in groups
                ]
            span = len(numbers) // len(groups)
            numbers = [_scaled(number, *groups[i // span][i % HALF_ROWS]) for i, number in enumerate(numbers)]
        return operand(numbers)

    return convert(words, scales)  # pyright: ignore[reportCallIssue]


def _numbers(word: Any, coding: Coding) -> list[Any]:
    """Of a word the pairs of bfloat16 numbers, in the order of registers; of 4 bits with 128 too much."""
    match coding:
        case "int8":
            return [_asm(INT8_TO_BFLOAT16.format(which), word) for which in INT8_PAIRS]
        case "int4":
            text = "shr.u32 a, $1, {}; lop3.b32 $0, a, 0x000f000f, {}, 0xea;"
            return [_asm(text.format(4 * pair, ONES), word) for pair in range(4)]
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


def _groups(words: list[list[Any]], grouping: Grouping, chunk: int) -> list[list[tuple[Any, Any | None]]]:
    """(scale, zero), twice in a register, of each group of a chunk and each of a thread's rows."""

    def twice(word: Any, half: int) -> Any:
        return _asm(f"prmt.b32 $0, $1, $1, {(0x1010, 0x3232)[half]};", word)

    if grouping.has_zeros:
        return [[(twice(row, 0), twice(row, 1)) for row in rows] for rows in words]
    halves = (chunk,) if grouping.words == 1 else (0, 1)
    return [[(twice(row, half), None) for row in rows] for rows in words for half in halves]


def _scaled(number: Any, scale: Any, zero: Any | None) -> Any:
    if zero is None:
        return _asm("mul.bf16x2 $0, $1, $2;", number, scale)
    return _asm("sub.bf16x2 a, $1, $3; mul.bf16x2 $0, a, $2;", number, scale, zero)


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
