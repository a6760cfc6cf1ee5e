"""Words of the layout for TPUs turned into numbers, in vector memory."""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.quant_matmul.weight import TABLES, TPU_ROWS, TPU_WORDS, Coding, numbers_of

SIGNS, REST = -0x7F7F7F80, 0x1C1C1C1C  # of float8_e4m3b11fnuz, four in a word: the last holds a number of 3 bits
OFFSET: dict[str, int] = {"int4": 8}  # what codes lie lower by than they are


def numbers(words: Array, coding: Coding, dtype: jnp.dtype) -> Array:
    """[8 T, 128] int32, T tiles -> [columns, 128]: what the codes are, without a zero and a scale."""
    match numbers_of(coding):
        case "int8":
            return pltpu.bitcast(words, jnp.int8).astype(dtype)
        case "int4":
            return pltpu.bitcast(words, jnp.int4).astype(dtype)
        case "fp8":
            return _floats(words, dtype)
        case "mxfp4":
            low = words << 4 & SIGNS | words << 2 & REST
            high = words & SIGNS | words >> 2 & REST
            halves = [_floats(half, dtype).reshape(-1, 1, 4 * TPU_WORDS, TPU_ROWS) for half in (low, high)]
            return jnp.concatenate(halves, axis=1).reshape(-1, TPU_ROWS)
        case _:
            return _looked_up(words, coding).astype(dtype)


def _floats(words: Array, dtype: jnp.dtype) -> Array:
    return pltpu.bitcast(words, jnp.float8_e4m3b11fnuz).astype(dtype)


def _looked_up(words: Array, coding: Coding) -> Array:
    """A table is two registers, in which a row is a number: a TPU takes any of 8 rows for each place."""
    row = lax.broadcasted_iota(jnp.int32, (TPU_WORDS, TPU_ROWS), 0)
    tables = []
    for half in (TABLES[coding][:8], TABLES[coding][8:]):
        table = jnp.full(row.shape, float(half[0]), jnp.float32)
        for i in range(1, len(half)):
            table = jnp.where(row == i, float(half[i]), table)
        tables.append(table)
    found = []
    for first in range(0, words.shape[0], TPU_WORDS):
        tile = words[first : first + TPU_WORDS]
        for part in range(8):
            low, high = (_rows(table, tile >> 4 * part & 7) for table in tables)
            found.append(jnp.where(tile << 28 - 4 * part < 0, high, low))
    return jnp.concatenate(found, axis=0)


def _rows(table: Array, row: Array) -> Array:
    """[8, 128]: at each place the table's number of that row. `jnp.take_along_axis` would look for negative ones."""
    return lax.gather(
        table,
        row[..., None],
        lax.GatherDimensionNumbers(
            offset_dims=(),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
            operand_batching_dims=(1,),
            start_indices_batching_dims=(1,),
        ),
        (1, 1),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
