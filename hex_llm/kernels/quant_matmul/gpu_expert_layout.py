"""The layout "hopper" of the weights of experts, whose products the kernels of `grouped_matmul` are.

There the sums of several experts are added before they leave the registers, so that scales belong to the numbers and
not to the sums: a scale for each row is repeated for its groups. And columns are filled up with zeros to whole tiles,
which is what lets gpt-oss lie so: the numbers of its rows are no multiple of a tile's.

Tokens stay in bfloat16, with weights of fp8, too: its numbers are decoded as the others are, and rounded less.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.quant_matmul import gpu_layout
from hex_llm.kernels.quant_matmul.gpu_layout import CHUNK, WHOLE
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, HOPPER_ROWS, Codes, Packed

MANY_TILES = 16  # from here on one more is little, and an even number of them can be cut


def supports(codes: Codes) -> bool:
    """Whether weights [E, out, in] can lie so."""
    if len(codes.shape) != 3 or codes.order is not None:
        return False
    _, out, size = codes.shape
    if not out or not size or out % HOPPER_ROWS or size % CHUNK:
        return False
    group = size // codes.scale.shape[-1]
    return group in (32, CHUNK) or group % (HOPPER_COLUMNS if size % HOPPER_COLUMNS == 0 else CHUNK) == 0


def pack(codes: Codes) -> Packed:
    """Columns may be more than the weight has; those stand for zeros."""
    if not supports(codes):
        raise ValueError(
            f"experts {codes.shape} of {codes.coding} with {codes.scale.shape[-1]} groups cannot lie so: it takes "
            f"multiples of {HOPPER_ROWS} rows and {CHUNK} columns, and groups of 32, 64 or a multiple of 128"
        )
    return gpu_layout.pack(_whole_tiles(_with_groups(codes)))


def _with_groups(codes: Codes) -> Codes:
    """With scales of groups, not of rows, and zeros where a layout has both."""
    size, groups = codes.shape[-1], codes.scale.shape[-1]
    has_zeros = codes.coding in WHOLE
    zero = jnp.zeros_like(codes.scale) if codes.zero is None and has_zeros else codes.zero
    times = 1
    if size // groups > CHUNK and (not has_zeros or size % HOPPER_COLUMNS):
        times = size // groups // CHUNK
    return dataclasses.replace(codes, scale=_repeated(codes.scale, times), zero=_repeated(zero, times))


def _repeated(values: Array | None, times: int) -> Array | None:
    return values if values is None or times == 1 else jnp.repeat(values, times, axis=-1)


def _whole_tiles(codes: Codes) -> Codes:
    size, groups = codes.shape[-1], codes.scale.shape[-1]
    tiles = -(-size // HOPPER_COLUMNS)
    if tiles > MANY_TILES and size % HOPPER_COLUMNS:
        tiles += tiles % 2
    missing = tiles * HOPPER_COLUMNS - size

    def filled(values: Array | None, count: int) -> Array | None:
        return values if values is None or not count else jnp.pad(values, ((0, 0), (0, 0), (0, count)))

    missing_groups = missing * groups // size
    return dataclasses.replace(
        codes,
        codes=filled(codes.codes, missing),
        scale=filled(codes.scale, missing_groups),
        zero=filled(codes.zero, missing_groups),
    )
