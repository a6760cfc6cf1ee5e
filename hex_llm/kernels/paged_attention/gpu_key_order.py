"""Queries as decode attention on Hopper multiplies them with pages of 8-bit numbers.

A warpgroup that widens keys in its registers has their columns in another order (`gpu_decode_narrow`), which must be
that of the queries, too. To turn them round would be a kernel of its own, so whoever makes them writes them like that.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from hex_llm.kernels.gpu_warps import LANES
from hex_llm.pytree import pytree

COLUMNS = 16  # that are in another order among themselves: of 4 threads, two pairs each


@pytree
class KeyOrdered:
    """Queries [T, N, H] with their columns in the order of keys, and in the type in which they are multiplied."""

    values: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the queries that they were made of."""
        return jnp.dtype(jnp.bfloat16)


def in_key_order(q: Array) -> Array:
    """Queries [..., H] with their columns in the order of `gpu_decode_narrow.keys`."""
    split = q.reshape(*q.shape[:-1], -1, 4, 2, 2)
    return split.swapaxes(-3, -2).reshape(q.shape)


def layout(rows: int, columns: int, *, warps: tuple[Any, ...], ordered: bool) -> Any:
    """Of [rows, columns] with a row for each warp. A lane has the numbers at its place: as they lie in memory, or in
    the order of keys. `warps` are those that hold copies."""
    vector = 2 if columns % (2 * LANES) == 0 else 1
    tiles = ((rows, LANES * vector), (COLUMNS,), (4,), (2,))
    single = ((1,),) if vector == 1 else ()  # then the two of a pair are those of two lanes
    depth = -len(single)
    thread, which, pair = depth - 3, depth - 2, (-2,) if single else ()
    return plgpu.Layout.TILED(
        fragmented_array.Tiling((*tiles, *single)),
        warp_dims=(() if rows == 1 else (depth - 5,)) + warps,
        lane_dims=(depth - 4, *((which, thread) if ordered else (thread, which)), *pair),
        vector_dim=-1,
    )


def renamed(values: Array, ordered: Any, plain: Any) -> Array:
    """Numbers that were loaded in the order of keys, as those that are at the places where the lanes have them: to
    write these is to write the others in the order of keys."""

    @plgpu.inline_mgpu(
        arg_types=(ordered,), return_type=plgpu.ShapeDtypeStruct(values.shape, values.dtype, layout=plain)
    )
    def call(_: Any, values: Any) -> Any:
        registers = np.empty_like(values.registers)
        # Through another type, and back: Mosaic would take what it knows to be the same for what it was before.
        registers.flat[:] = [_through_whole_numbers(each) for each in values.registers.flat]
        return mgpu.FragmentedArray(_registers=registers, _layout=plain.to_mgpu(), _is_signed=None)

    return call(values)  # pyright: ignore[reportCallIssue]


def _through_whole_numbers(register: Any) -> Any:
    width = mgpu.utils.bitwidth(register.type)
    return mgpu.utils.bitcast(mgpu.utils.bitcast(register, ir.IntegerType.get_signless(width)), register.type)
