"""How rows are dealt to the four warps of a block that has no more of them."""

import math
from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPS = 4
LANES = 32
VECTORS = (4, 2, 1)  # elements that a lane loads at a time, the most that fit


def warp_per_row(rows: int, columns: int, vectors: tuple[int, ...] = VECTORS) -> Any:
    """The layout of [rows, columns] with a row for each warp, of an even number of columns; what is too few for all
    warps or lanes is held twice."""
    lanes = math.gcd(columns, LANES)
    vector = next(size for size in vectors if columns // lanes % size == 0)
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((rows, lanes * vector), (vector,))),
        warp_dims=(() if rows == 1 else (-3,)) + copies(WARPS // rows),
        lane_dims=(-2, *copies(LANES // lanes)),
        vector_dim=-1,
    )


def copies(times: int) -> tuple[Any, ...]:
    """A dimension of a layout along which all have the same."""
    return () if times == 1 else (fragmented_array.Replicated(times),)
