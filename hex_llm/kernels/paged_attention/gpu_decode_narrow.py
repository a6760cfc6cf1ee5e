"""8-bit keys and values on their way to tensor cores, through the registers of a warpgroup and no further.

Keys and the values of a head are the rows of products then (see `gpu_decode_columns`), which wgmma takes from registers
too. A thread has to hold certain numbers of 16 bits for that; from memory it gets four of 8 bits at a time. Instead of
moving numbers between threads, what belongs together is called by another name:

- of keys, the columns are in another order, which is the same for queries (`gpu_key_order`) and so changes no product;
- of values, turned, the rows are in another order, and so are those of the sums, which are turned back in the end.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from hex_llm.kernels.hopper import INT8_PAIRS, INT8_TO_BFLOAT16

WORD = 4  # bytes
PAIRS = (0, 1)  # of the numbers in a word


def turned_layout(head_dim: int) -> Any:
    """Of [8n, H]: a thread has, of every second pair of rows and of H/32 columns beside each other, all."""
    each = head_dim // 32
    words = ((WORD,),) if each > WORD else ()
    depth = -len(words)  # by which the other dimensions are further from the last
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((8, head_dim), (2, head_dim // 4), (each,), *words)),
        warp_dims=(depth - 4,),
        lane_dims=(depth - 2, depth - 5),
        vector_dim=-1,
    )


def load_keys(ref: Any) -> Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA_8BIT)


def load_values(ref: Any) -> Array:
    return plgpu.load(ref, layout=turned_layout(ref.shape[1]), optimized=False)


def keys(narrow: Array, dtype: Any) -> Array:
    """[tile, H] of `load_keys` -> the same in 16 bits, as wgmma's left operand, with columns in another order."""
    pair_of = _pair_of(narrow.dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_8BIT,),
        return_type=plgpu.ShapeDtypeStruct(narrow.shape, dtype, layout=plgpu.Layout.WGMMA),
    )
    def convert(_, narrow):
        words = narrow.registers.reshape(narrow.shape[0] // 64, -1, 2)  # 64 rows, 16 columns, half of the rows
        pairs = [pair_of(_word(each), pair) for rows in words for row in rows for pair in PAIRS for each in row]
        return _operand(pairs, narrow.shape, dtype)

    return convert(narrow)  # pyright: ignore[reportCallIssue]: Pallas gives the other argument


def values(narrow: Array, dtype: Any) -> Array:
    """[tile, H] of `load_values` -> [H, tile] in 16 bits, as wgmma's left operand, with rows in another order."""
    tile, head_dim = narrow.shape
    pair_of = _pair_of(narrow.dtype)

    @plgpu.inline_mgpu(
        arg_types=(turned_layout(head_dim),),
        return_type=plgpu.ShapeDtypeStruct((head_dim, tile), dtype, layout=plgpu.Layout.WGMMA),
    )
    def convert(_, narrow):
        # Of 8 tokens a thread has two, and of these so many words.
        words = narrow.registers.reshape(tile // 8, 2, -1)
        pairs = []
        for block in range(head_dim // 64):  # of two columns
            word, second = divmod(2 * block, WORD)
            for first, other in ((_word(each[0, word]), _word(each[1, word])) for each in words):
                both = _asm(f"prmt.b32 $0, $1, $2, {0x7362 if second else 0x5140};", first, other)
                pairs.extend(pair_of(both, pair) for pair in PAIRS)
        return _operand(pairs, (head_dim, tile), dtype)

    return convert(narrow)  # pyright: ignore[reportCallIssue]: Pallas gives the other argument


def turned_back(sums: Array) -> Array:
    """[H, Q] float32 with the rows of `values` -> [Q, H] in `turned_layout`, with columns in order."""
    head_dim, queries = sums.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((queries, head_dim), jnp.float32, layout=turned_layout(head_dim)),
    )
    def rename(_, sums):
        layout = turned_layout(head_dim).to_mgpu()
        registers = np.empty(layout.registers_shape((queries, head_dim)), dtype=object)
        blocks = sums.registers.reshape(head_dim // 64, queries // 8, 2)
        vector_type = ir.VectorType.get((layout.vector_length,), ir.F32Type.get())
        columns = [
            vector.extract(each, [], [query])
            for eight in range(queries // 8)
            for query in range(2)
            for block in blocks
            for each in block[eight]
        ]
        size = layout.vector_length
        runs = [columns[start : start + size] for start in range(0, len(columns), size)]
        registers.flat[:] = [vector.from_elements(vector_type, run) for run in runs]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return rename(sums)  # pyright: ignore[reportCallIssue]: as above


def _word(register: Any) -> Any:
    """The bytes of a register, as many as it has."""
    bits = 8 * ir.VectorType(register.type).shape[0]
    word = mgpu.utils.bitcast(register, ir.IntegerType.get_signless(bits))
    i32 = ir.IntegerType.get_signless(32)
    return word if bits == 32 else llvm.zext(i32, word)


def _pair_of(dtype: Any) -> Callable[[Any, int], Any]:
    return _whole_numbers if dtype == jnp.int8 else _float8


def _float8(word: Any, pair: int) -> Any:
    """The first or the second two numbers of a word of float8, as float16."""
    which = ("low", "high")[pair]
    return _asm(f"mov.b32 {{low, high}}, $1; cvt.rn.f16x2.e4m3x2 $0, {which};", word)


def _whole_numbers(word: Any, pair: int) -> Any:
    """The same of int8, as bfloat16."""
    return _asm(INT8_TO_BFLOAT16.format(INT8_PAIRS[pair]), word)


def _operand(pairs: list[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """Registers in the order (64 rows, 8 columns, half of the rows), as wgmma's left operand."""
    layout = mgpu.WGMMA_LAYOUT
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    pair_type = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(dtype))
    registers.flat[:] = [mgpu.utils.bitcast(each, pair_type) for each in pairs]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _asm(text: str, *arguments: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    constraints = ",".join(["=r"] + ["r"] * len(arguments))
    return llvm.inline_asm(i32, list(arguments), f"{{ .reg .b16 low, high; .reg .b32 a, b, c; {text} }}", constraints)
