"""From codes of 4 bits to float8_e4m3fn numbers in the registers of a warpgroup: nothing but the other code of a byte
has to be masked off.

A number of that type with no more than its last 4 bits set counts in 512ths, whether the first of them belongs to the
exponent or not. So a code is there as it is, a 512th of itself, and exactly.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from hex_llm.kernels.quant_matmul.gpu_layout import LINE, VECTOR
from hex_llm.kernels.quant_matmul.gpu_w4a8_layout import LINES
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, HOPPER_ROWS

WORDS = plgpu.Layout.WG_STRIDED((LINES, LINE), VECTOR)  # how those of a tile are to be loaded
LOW = 0x0F0F0F0F


def decode(words: Array) -> Array:
    """A tile's codes, [8, 128] int32 -> [64, 128] float8_e4m3fn."""

    @plgpu.inline_mgpu(
        arg_types=(WORDS,),
        return_type=plgpu.ShapeDtypeStruct(
            (HOPPER_ROWS, HOPPER_COLUMNS), jnp.float8_e4m3fn, layout=plgpu.Layout.WGMMA_8BIT
        ),
    )
    def convert(_: Any, words: Any) -> Any:
        registers = [vector.extract(each, [], [i]) for each in words.registers.flat for i in range(VECTOR)]
        return _operand([half for word in registers for half in _halves(word)])

    return convert(words)  # pyright: ignore[reportCallIssue]


def _halves(word: Any) -> tuple[Any, Any]:
    """Of the two rows that a word has codes of."""
    i32 = ir.IntegerType.get_signless(32)
    low = mgpu.utils.c(LOW, i32)
    return arith.andi(word, low), arith.andi(arith.shrui(word, mgpu.utils.c(4, i32)), low)


def _operand(numbers: list[Any]) -> Any:
    """Registers in the order (16 columns, half of the rows), as wgmma's left operand."""
    layout = mgpu.WGMMA_LAYOUT_8BIT
    registers = np.empty(layout.registers_shape((HOPPER_ROWS, HOPPER_COLUMNS)), dtype=object)
    four = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
    registers.flat[:] = [mgpu.utils.bitcast(number, four) for number in numbers]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
