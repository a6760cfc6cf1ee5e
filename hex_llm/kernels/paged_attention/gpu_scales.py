"""The scales of int8 pages in attention on Hopper, which never meet the numbers that they belong to.

A key's scale multiplies the scores of its token, and a value's the weights: so numbers go to the tensor cores as they
are, which bfloat16 has exactly, and a token's scale is multiplied with once for a query and not for each number.
"""

from typing import Any

from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.paged_attention.pages import Pages, Scaled


def in_parts(pages: Pages, part: int) -> tuple[Array, Array | None]:
    """What is copied at a time: numbers [n, part, H], and their scales [n, part] where they have some."""
    numbers, scales = (pages.numbers, pages.scales.reshape(-1, part)) if isinstance(pages, Scaled) else (pages, None)
    return numbers.reshape(-1, part, numbers.shape[-1]), scales


def copy(source: Any, target: Any, barrier: Any) -> None:
    """Starts to copy the scales of a part, which is within the array. Told so, Mosaic takes the instruction for bytes
    in a run: that one begins at any 16 bytes of shared memory, and not, like others, at 128, which 8 tokens have not.
    """
    plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def load(ref: Any, axis: int) -> Array:
    """Of a tile in shared memory, for an array whose tokens are along the axis."""
    return plgpu.load(ref, layout=layout(axis), optimized=False)


def layout(axis: int) -> Any:
    return plgpu.Layout.WGMMA.reduce(1 - axis)


def scaled(x: Array, scales: Array | None, axis: int) -> Array:
    """`x` with each token, along the axis, multiplied by its scale."""
    return x if scales is None else x * lax.broadcast_in_dim(scales, x.shape, [axis])
