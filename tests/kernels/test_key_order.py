"""Queries in the order of keys: what the layouts of `gpu_key_order` mean, and that decode attention takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import fragmented_array

from hex_llm.kernels.paged_attention import gpu_key_order
from hex_llm.kernels.paged_attention.gpu_decode import takes_key_order
from hex_llm.kernels.paged_attention.gpu_key_order import in_key_order

BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn


def places_by_lane(layout, rows: int, columns: int) -> np.ndarray:
    """[rows, lanes * numbers]: the column of each number, warp by warp, lane by lane."""
    tiled = layout.to_mgpu()
    numbers = np.tile(np.arange(columns), (rows, 1))
    for tile in tiled.tiling.tiles:
        kept, cut = numbers.shape[: -len(tile)], numbers.shape[-len(tile) :]
        split = numbers.reshape(*kept, *(n for size, each in zip(cut, tile, strict=True) for n in (size // each, each)))
        first = len(kept)
        outer, inner = range(first, split.ndim, 2), range(first + 1, split.ndim, 2)
        numbers = split.transpose(*range(first), *outer, *inner)
    lanes = [numbers.ndim + each for each in tiled.lane_dims]
    warp = [numbers.ndim + each for each in tiled.warp_dims if isinstance(each, int)]
    others = [i for i in range(numbers.ndim - 1) if i not in lanes and i not in warp]
    return numbers.transpose(*warp, *others, *lanes, numbers.ndim - 1).reshape(rows, -1)


@pytest.mark.parametrize(("rows", "columns"), [(4, 64), (2, 64), (4, 32), (1, 32), (4, 128)])
def test_lanes_have_columns_as_they_lie_or_in_the_order_of_keys(rows, columns):
    copies = () if rows == 4 else (fragmented_array.Replicated(4 // rows),)
    plain, ordered = (
        places_by_lane(gpu_key_order.layout(rows, columns, warps=copies, ordered=each), rows, columns)
        for each in (False, True)
    )
    np.testing.assert_array_equal(plain, np.tile(np.arange(columns), (rows, 1)))
    np.testing.assert_array_equal(ordered, in_key_order(jnp.asarray(plain)))
    assert (plain != ordered).any()


@pytest.mark.parametrize(
    ("heads", "head_dim", "pages_dtype", "wanted"),
    [
        ((32, 8), 128, FP8, True),
        ((32, 8), 128, jnp.int8, True),
        ((32, 8), 64, FP8, True),
        ((16, 8), 256, FP8, True),
        ((32, 8), 128, BF16, False),  # nothing is widened
        ((32, 8), 96, FP8, False),  # widened through shared memory
        ((7, 1), 128, FP8, False),  # each group has rows of its own
    ],
)
def test_only_queries_that_meet_widened_keys_are_in_their_order(heads, head_dim, pages_dtype, wanted):
    q = jax.ShapeDtypeStruct((3, heads[0], head_dim), BF16)
    pages = jax.ShapeDtypeStruct((9, 2, heads[1], 16, head_dim), pages_dtype)
    assert takes_key_order(q, pages) == wanted
