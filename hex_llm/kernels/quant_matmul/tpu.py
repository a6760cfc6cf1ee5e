"""Products with weights in few bits on TPUs: a weight comes as it lies, and becomes bf16 in vector memory.

For each block of tokens, which stays there, the weight is read in blocks of rows and columns, and decoded some columns
at a time. The same kernel does experts: there, a block of tokens has a weight of its own. Of w8a8 there is nothing to
decode where matrix units multiply int8.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.quant_matmul.reference import scale_rows
from hex_llm.kernels.quant_matmul.rows import TYPES, taken_by
from hex_llm.kernels.quant_matmul.tpu_decode import OFFSET, numbers
from hex_llm.kernels.quant_matmul.tpu_layout import tile_columns
from hex_llm.kernels.quant_matmul.tpu_sizes import LANES, Sizes, sizes_of
from hex_llm.kernels.quant_matmul.weight import TPU_ROWS, TPU_WORDS, Coding, Packed, numbers_of

# Chips that compute with float32 only: they take bf16 apart before, and put it together after each operation.
ONLY_FLOAT32 = ("TPU v4", "TPU v5")
# Chips whose matrix units multiply int8, and at twice bf16's rate.
INT8 = ("TPU v5", "TPU v6")


def matmul(x: Array, weight: Packed, *, dtype: jnp.dtype) -> Array:
    """As `reference.matmul`, for a weight of the layout "tpu"; both are bf16 when they are multiplied, or int8."""
    if weight.order is not None:
        x = x[:, weight.order]
    one = jax.tree.map(lambda each: each[None], weight)
    sizes = sizes_for(x.shape[0], one)
    blocks = pl.cdiv(x.shape[0], sizes.tokens)
    return product(x, one, jnp.zeros(blocks, jnp.int32), jnp.full(1, blocks, jnp.int32), sizes, dtype=dtype)


def sizes_for(tokens: int, weight: Packed) -> Sizes:
    _, out, size = weight.shape
    return sizes_of(tokens, out, size, weight.scale.shape[2], weight.coding)


def product(x: Array, weight: Packed, expert: Array, blocks: Array, sizes: Sizes, *, dtype: jnp.dtype) -> Array:
    """[M, in] x [E, out, in] -> [M, out]: each block of `sizes.tokens` times its own of E weights, `expert` [blocks].

    Only the first `blocks` [1] are there; of others the result is not written.
    """
    row_scale = None
    if weight.coding in TYPES:
        values, row_scale = scale_rows(x, taken_by(weight))
        x = jnp.round(values) if TYPES[weight.coding] == "int8" else _rounded_to_fp8(values)
    in_int8 = weight.coding == "w8a8" and _multiplies_int8()
    x = x.astype(jnp.int8 if in_int8 else jnp.bfloat16)
    (tokens, size), out, groups = x.shape, weight.shape[1], weight.scale.shape[2]
    width, at_once = sizes.tiles * TPU_ROWS, sizes.tiles_at_once * TPU_ROWS
    grid = expert.shape[0], out // width, size // sizes.columns

    def place(block: Array, rows: Array, columns: Array, expert: Any, blocks: Any) -> tuple[Array, ...]:
        """(tokens, expert, rows, columns); past the end those that were there last, which are not read again."""
        there = block < blocks[0]
        block = jnp.where(there, block, blocks[0] - 1)
        return block, expert[block], jnp.where(there, rows, grid[1] - 1), jnp.where(there, columns, grid[2] - 1)

    def of_tokens(*at: Any) -> tuple[Any, ...]:
        return place(*at)[0], 0

    def of_data(*at: Any) -> tuple[Any, ...]:
        return *place(*at)[1:], 0, 0

    def of_groups(*at: Any) -> tuple[Any, ...]:
        return *place(*at)[1:3], 0, 0

    def of_result(*at: Any) -> tuple[Any, ...]:
        tokens, _, rows, _ = place(*at)
        return tokens, rows

    tiles = sizes.columns // tile_columns(weight.coding)
    operands = [
        (x, pl.BlockSpec((sizes.tokens, size), of_tokens)),
        (weight.data, pl.BlockSpec((1, sizes.tiles, tiles, TPU_WORDS, TPU_ROWS), of_data)),
    ]
    per_group = pl.BlockSpec((1, sizes.tiles, groups, TPU_ROWS), of_groups)
    operands += [(each, per_group) for each in (weight.scale, weight.zero) if each is not None]
    if row_scale is not None:
        operands.append((row_scale, pl.BlockSpec((sizes.tokens, 1), of_tokens)))
    wide = jnp.int8 if in_int8 else jnp.float32 if _only_float32() else jnp.bfloat16
    scratch = [pltpu.VMEM((width // at_once, sizes.tokens, at_once), jnp.int32 if in_int8 else jnp.float32)]
    if wide == jnp.float32:
        scratch.append(pltpu.VMEM((sizes.tiles_at_once, sizes.columns_at_once, TPU_ROWS), jnp.bfloat16))
    scratch += [pltpu.VMEM((sizes.tiles, groups, TPU_ROWS), jnp.float32)] * (1 if weight.zero is None else 2)
    return pl.pallas_call(
        partial(
            _kernel,
            sizes=sizes,
            coding=weight.coding,
            has_zero=weight.zero is not None,
            has_row_scale=row_scale is not None,
            wide=wide,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[spec for _, spec in operands],
            out_specs=pl.BlockSpec((sizes.tokens, width), of_result),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((tokens, out), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=sizes.vmem, disable_bounds_checks=True
        ),
        name="quant_matmul",
    )(expert, blocks, *(array for array, _ in operands))


def _rounded_to_fp8(values: Array) -> Array:
    """float32 to the nearest numbers that float8_e4m3fn has. Of chips without that type, XLA's own conversion has many
    times the instructions, and takes a compiler long.
    """
    exponent = lax.bitcast_convert_type(values, jnp.int32) & 0x7F800000
    # There are 3 bits after the first; below 2**-6 the first is 0, and steps get no smaller.
    step = jnp.maximum(lax.bitcast_convert_type(exponent, jnp.float32), 2.0**-6) / 8
    return jnp.round(values / step) * step


def _device_kind() -> str:
    """Of the device that is compiled for, where the program says which; else of the one that is there."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def _multiplies_int8() -> bool:
    return _device_kind().startswith(INT8)


def _only_float32() -> bool:
    kind = _device_kind()
    return not kind.startswith("TPU") or kind.startswith(ONLY_FLOAT32)


def _kernel(
    expert: Any, blocks: Any, x: Any, data: Any, scale: Any, *refs: Any,
    sizes: Sizes, coding: Coding, has_zero: bool, has_row_scale: bool, wide: Any,
) -> None:  # fmt: skip
    del expert
    offset = OFFSET.get(numbers_of(coding), 0)
    rest = list(refs)
    zero = rest.pop(0) if has_zero else None
    row_scale = rest.pop(0) if has_row_scale else None
    out, total = rest.pop(0), rest.pop(0)
    kept = rest.pop(0) if wide == jnp.float32 else None
    scales, *offsets = rest
    size, groups, steps = x.shape[1], scale.shape[2], sizes.columns // sizes.columns_at_once
    tiles, groups_at_once = sizes.columns_at_once // tile_columns(coding), groups * sizes.columns_at_once // size or 1
    at_once = sizes.tiles_at_once
    before = pl.program_id(2) * steps

    def of_groups(each: Any, tile: Any, step: Any) -> Array:
        """[groups at once, 1, 128] in the type that is computed with."""
        first = (before + step) * groups_at_once if groups > 1 else 0
        return each[tile, pl.ds(first, groups_at_once)][:, None].astype(wide)

    def decoded(tile: Any, step: Any) -> Array:
        """[columns at once, 128] in the type of `x`."""
        words = data[0, tile, pl.ds(step * tiles, tiles)].reshape(tiles * TPU_WORDS, TPU_ROWS)
        grouped = numbers(words, coding, wide).reshape(groups_at_once, -1, TPU_ROWS)
        if zero is not None:
            grouped -= of_groups(offsets[0], tile, step)
        elif offset:
            grouped += offset
        if groups > 1:
            grouped *= of_groups(scales, tile, step)
        return grouped.reshape(-1, TPU_ROWS).astype(x.dtype)

    def one(index: Any, _: None) -> None:
        part, step = lax.div(index, steps), lax.rem(index, steps)
        columns = slice(None)
        if size > sizes.columns_at_once:
            columns = pl.ds(pl.multiple_of((before + step) * sizes.columns_at_once, LANES), sizes.columns_at_once)

        weight = [decoded(part * at_once + i, step) for i in range(at_once)]
        if kept is not None:
            # Halves of registers, which is what float32 becomes, are put together by a store, not by the matrix unit.
            for i in range(at_once):
                kept[i] = weight[i]
            weight = [kept[i] for i in range(at_once)]
        total[part] += lax.dot_general(
            x[:, columns],
            jnp.concatenate(weight, axis=1),
            (((1,), (0,)), ((), ())),
            preferred_element_type=total.dtype,
        )

    def begin() -> None:
        total[...] = jnp.zeros(total.shape, total.dtype)
        # In 32 bits, of which any row can be read.
        scales[...] = scale[0].astype(jnp.float32)
        if zero is not None:
            offsets[0][...] = zero[0].astype(jnp.float32) - offset

    def end() -> None:
        for tile in range(sizes.tiles):
            result = total[tile // at_once, :, _lanes(tile % at_once)].astype(jnp.float32)
            if groups == 1:
                result *= scales[tile]
            if row_scale is not None:
                result *= row_scale[...]
            out[:, _lanes(tile)] = result.astype(out.dtype)

    @pl.when(pl.program_id(0) < blocks[0])
    def _():
        pl.when(pl.program_id(2) == 0)(begin)
        lax.fori_loop(0, sizes.tiles // at_once * steps, one, None)
        pl.when(pl.program_id(2) == pl.num_programs(2) - 1)(end)


def _lanes(tile: int) -> slice:
    return slice(tile * TPU_ROWS, (tile + 1) * TPU_ROWS)
