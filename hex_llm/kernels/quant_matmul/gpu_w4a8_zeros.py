"""What zeros take away from sums of codes: of each tile as much of the sum of a token's numbers as a row's zero and
scale say. Of some tiles at once that is a product, for the tensor cores. Tile by tile it took a fifth of the time.

They do it in bfloat16: a float32 number is one, and another of what is left of it. What is left of both is too little
to be multiplied.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.quant_matmul.rows import TILES, two_parts
from hex_llm.kernels.quant_matmul.weight import HOPPER_ROWS

LAYOUT = plgpu.Layout.WGMMA_TRANSPOSED  # in which threads have neighbours of a column
_LINE = 2 * TILES  # bytes of a token


class Zeros(NamedTuple):
    """What a block has for it in shared memory."""

    of_rows: Any  # [tiles of a slot, TILES, 64] float32: the zero of each row in each tile, times its scale
    of_tokens: Any  # [2, tokens, TILES] bfloat16: see `Rows.sums`
    there: Any  # a barrier: those of the tokens are
    free: Any  # likewise: all who multiply are done with them


def scratch(workers: int, stack: int, tokens: int) -> Zeros:
    """The memory of `Zeros`."""
    transforms = plgpu.TilingTransform((8, TILES)), plgpu.SwizzleTransform(_LINE)  # pyright: ignore[reportAbstractUsage]
    return Zeros(
        plgpu.SMEM((workers * stack, TILES, HOPPER_ROWS), jnp.float32),
        plgpu.SMEM((2, tokens, TILES), jnp.bfloat16, transforms=transforms),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=workers),
    )


def size(workers: int, stack: int, tokens: int) -> int:
    """Bytes of that."""
    return workers * stack * HOPPER_ROWS * TILES * 4 + 2 * tokens * _LINE


def await_own_warp(of_rows: Any) -> None:
    """A warp reads of `Zeros.of_rows` what it has left there itself, and no other's."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def barrier(_: Any, __: Any) -> None:
        mgpu.utils.warp_barrier()

    barrier(of_rows)  # pyright: ignore[reportCallIssue]


def parts_of_rows(zeros: Zeros, tile: Any, first: Array, count: Array) -> tuple[Array, Array]:
    """The left operand of a tile, for so many of TILES: others may have what was there before."""
    values = plgpu.load(zeros.of_rows.at[tile].transpose((1, 0)), layout=LAYOUT, optimized=False)
    halves = [plgpu.layout_cast(each, plgpu.Layout.WGMMA) for each in two_parts(values)]
    # Only now: Mosaic takes a thread's neighbours for ones of the last axis, which those of LAYOUT are not.
    place = plgpu.broadcasted_iota(jnp.int32, values.shape, 1, layout=plgpu.Layout.WGMMA)
    is_one = (place >= first) & (place < first + count)
    none = plgpu.layout_cast(jnp.zeros(values.shape, jnp.bfloat16), plgpu.Layout.WGMMA)
    high, low = (jnp.where(is_one, each, none) for each in halves)
    return high, low
