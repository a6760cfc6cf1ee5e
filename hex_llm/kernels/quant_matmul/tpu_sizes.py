"""The sizes in which products with weights in few bits are done on TPUs."""

import math
from dataclasses import dataclass

from hex_llm.kernels.quant_matmul.weight import TPU_ROWS, Coding, bits

LANES, SUBLANES = 128, 16  # a tile of bf16
# v5e and v6e have 128 MiB of vector memory, v5p and tpu7x half of it.
X_BYTES = 16 << 20  # of `x` at a time, of which there are two
BLOCK_BYTES = 2 << 20  # of the weight, likewise: a copy that is not worth waiting for
ASIDE_BYTES = 8 << 20  # for what the compiler puts aside
# Of tokens in a block: matrix units take longer with so many than it takes to decode the weight again for the next.
MOST_TOKENS = 512
COLUMNS_AT_ONCE = 512
LONGEST = 4096  # columns at once, where nothing shorter divides
# Tiles of rows that are multiplied with at once, the better ones first: wide enough for all matrix units, and short.
TILES_AT_ONCE = (4, 6, 7, 5, 3, 2, 1)
MOST_TILES = 8


@dataclass(frozen=True)
class Sizes:
    tokens: int  # in a block of `x`
    tiles: int  # of 128 rows of the weight, in a block of it
    tiles_at_once: int
    columns: int  # of the weight, in a block of it
    columns_at_once: int
    vmem: int  # bytes


def columns_at_once(size: int, groups: int) -> int | None:
    """Columns that are decoded together: whole groups, and whole tiles of `x` if they can be. None: too many."""
    step = math.lcm(LANES, size // groups if groups > 1 else 1)
    if size % step:
        return size if size <= LONGEST else None
    fitting = [n for n in range(step, max(COLUMNS_AT_ONCE, step) + 1, step) if size % n == 0]
    # Of matrix units some sum over 128 at a time, others over 256.
    found = max([n for n in fitting if n % (2 * LANES) == 0] or fitting)
    return found if found <= LONGEST else None


def sizes_of(tokens: int, out: int, size: int, groups: int, coding: Coding) -> Sizes:
    at_once = columns_at_once(size, groups)
    assert at_once is not None, "`tpu_layout.fits` has let it pass"
    block = min(tokens, MOST_TOKENS, max(X_BYTES // (2 * size) // LANES, 1) * LANES)
    row_tiles, row_bytes = out // TPU_ROWS, TPU_ROWS * bits(coding) // 8
    tiles_at_once = next(n for n in TILES_AT_ONCE if row_tiles % n == 0)
    columns = max(_divisors(size // at_once, BLOCK_BYTES // (tiles_at_once * row_bytes * at_once))) * at_once
    most = min(BLOCK_BYTES // (row_bytes * columns), MOST_TILES) if columns == size else 1
    tiles = max(_divisors(row_tiles // tiles_at_once, most // tiles_at_once)) * tiles_at_once
    padded, width = _round_up(block, SUBLANES), tiles * TPU_ROWS
    read = padded * size * 2 + tiles * row_bytes * columns + 2 * _round_up(groups, SUBLANES) * width * 4
    made = padded * width * 4
    vmem = 2 * (read + made) + made + tiles_at_once * TPU_ROWS * at_once * 2 + 2 * padded * LANES * 4 + ASIDE_BYTES
    return Sizes(block, tiles, tiles_at_once, columns, at_once, vmem)


def _divisors(number: int, most: int) -> list[int]:
    """Those that are not larger than `most`, and 1."""
    return [1, *(n for n in range(2, min(number, most) + 1) if number % n == 0)]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
