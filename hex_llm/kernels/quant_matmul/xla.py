"""Products with weights in few bits, in plain XLA. On a CPU, the matrix that a weight stands for is never in memory.

There, a block of the weight's rows at a time is decoded into what the cache holds. The two codes of a byte are not put
beside each other: those of the low halves and those of the high halves multiply columns of `x` of their own.
"""

import functools

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.quant_matmul.decode import decode
from hex_llm.kernels.quant_matmul.reference import quantize_rows
from hex_llm.kernels.quant_matmul.rows import TYPES, taken_by
from hex_llm.kernels.quant_matmul.weight import Coding, Packed, bits
from hex_llm.parallel.backend import backend
from hex_llm.pytree import pytree

BLOCK_BYTES = 4 << 20  # of decoded numbers; a smaller block is done so soon that threads wait for each other


def matmul(x: Array, weight: Packed, *, dtype: jnp.dtype, expert: Array | None = None) -> Array:
    """As `reference.matmul`; of a weight with experts, by that of one of them.

    An expert's weight is not taken out first: the copy would be as long as its codes.
    """
    if weight.order is not None:
        # Kept apart: a product that reads columns where they were gathered is one that XLA has no code for on CPUs.
        x = lax.optimization_barrier(x[:, weight.order])
    token_scale = None
    if weight.coding in TYPES:
        values, token_scale = quantize_rows(x, taken_by(weight))
        # Exact, as the weight's own numbers are in that type where their scale waits for the sum.
        x = _numbers(values).astype(jnp.bfloat16 if weight.scale.shape[-1] == 1 else x.dtype)
    if x.shape[0] == 1:
        x = x.astype(jnp.float32)
    out, size = weight.shape[-2:]
    blocks = _num_blocks(out, size * x.dtype.itemsize)
    rows = -(-out // blocks)
    first = 0 if expert is None else expert * out
    parts = _columns(x, weight)

    def one_block(start: int | Array) -> Array:
        result = _product(parts, _rows_of(weight, first + start, rows))
        return (result if token_scale is None else result * token_scale).astype(dtype)

    if blocks == 1:
        return one_block(0)

    def write_block(index: Array, result: Array) -> Array:
        start = jnp.minimum(index * rows, out - rows)  # the last one may do some rows of the one before again
        return lax.dynamic_update_slice_in_dim(result, one_block(start), start, axis=1)

    return lax.fori_loop(0, blocks, write_block, jnp.zeros((x.shape[0], out), dtype))


@pytree
class _Rows:
    """Some of a weight's rows, decoded: those of a byte's low half and of its high half apart."""

    values: list[Array]  # [rows, groups, columns] float32, before their scale
    scale: Array  # [rows, groups] float32


def _num_blocks(out: int, row_bytes: int) -> int:
    if backend() != "cpu":
        return 1
    return min(out, -(-out * row_bytes // BLOCK_BYTES))


def _columns(x: Array, weight: Packed) -> list[Array]:
    """[M, groups, columns] of `x`, for each of the codes that a byte has."""
    step = 8 // bits(weight.coding)
    return [x[:, part::step].reshape(x.shape[0], weight.scale.shape[-1], -1) for part in range(step)]


def _rows_of(weight: Packed, first: int | Array, rows: int) -> _Rows:
    """Rows are counted through all experts."""

    def part(array: Array) -> Array:
        return lax.dynamic_slice_in_dim(array.reshape(-1, array.shape[-1]), first, rows)

    data, scale = part(_codes(weight.data, weight.coding)), part(weight.scale).astype(jnp.float32)
    data = data.reshape(*scale.shape, -1)
    codes = [data] if bits(weight.coding) == 8 else [data & 15, data >> 4]
    values = [decode(each, weight.coding) for each in codes]
    if weight.zero is not None:
        zero = part(weight.zero).astype(jnp.float32)[..., None]
        values = [each - zero for each in values]
    return _Rows(values, scale)


def _numbers(values: Array) -> Array:
    """float32, of tokens in 8 bits."""
    if values.dtype == jnp.int8:
        return values.astype(jnp.float32)
    return decode(_codes(values, "fp8"), "fp8")


def _codes(data: Array, coding: Coding) -> Array:
    """As `decode` takes them."""
    return lax.bitcast_convert_type(data, jnp.uint8) if coding == "fp8" else data


def _product(parts: list[Array], weight: _Rows) -> Array:
    """[M, rows] float32."""
    return _one_row(parts, weight) if parts[0].shape[0] == 1 else _more_rows(parts, weight)


def _one_row(parts: list[Array], weight: _Rows) -> Array:
    terms = functools.reduce(jnp.add, [values * x for values, x in zip(weight.values, parts, strict=True)])
    terms = (terms * weight.scale[..., None]).reshape(weight.scale.shape[0], -1)
    if backend() == "cpu":
        # Its library is quick at such sums, but slow at what else it would take over with them.
        terms = lax.optimization_barrier(terms)
    return jnp.sum(terms, axis=1)[None, :]


def _more_rows(parts: list[Array], weight: _Rows) -> Array:
    rows, groups = weight.scale.shape

    def one_part(x: Array, values: Array) -> Array:
        if groups > 1:
            values = values * weight.scale[..., None]
        values = _rounded(values.reshape(rows, -1), x.dtype)
        columns = x.reshape(x.shape[0], -1)
        return lax.dot_general(columns, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    products = [one_part(x, values) for x, values in zip(parts, weight.values, strict=True)]
    total = functools.reduce(jnp.add, products)
    # Rows with one scale wait for it until here: whole numbers are exact in every type.
    return total if groups > 1 else total * weight.scale[:, 0][None, :]


def _rounded(values: Array, dtype: jnp.dtype) -> Array:
    if dtype != jnp.bfloat16 or backend() != "cpu":
        return values.astype(dtype)
    # Halves go away from zero here. Told to convert, XLA's CPU backend also asks of each number whether it is one and
    # whether it is even: a product of a few rows takes 1.2 times as long.
    upper = (lax.bitcast_convert_type(values, jnp.uint32) + jnp.uint32(0x8000)) >> 16
    return lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
