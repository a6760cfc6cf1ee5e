"""Rotating queries and keys and writing keys and values to their pages, as one kernel of a chain on Hopper.

A block has a token and a few of its heads, a warp for each. The pages are written in place: of a cache of many
gigabytes, a step changes a few lines.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPS = 4
LANES = 32


def supports(parts: Array, pages: Array, dtype: jnp.dtype) -> bool:
    head_dim = pages.shape[4]
    return pages.dtype == dtype == jnp.bfloat16 and does_heads_of(head_dim) and parts.shape[2] % head_dim == 0


def does_heads_of(head_dim: int) -> bool:
    """Whether halves of a head can be dealt to lanes."""
    return head_dim % (2 * LANES) == 0


@functools.partial(jax.jit, static_argnames="dtype")
def rope_write(
    parts: Array,
    tables: tuple[Array, Array],
    pages: Array,
    write_page: Array,
    write_offset: Array,
    dtype: jnp.dtype,
) -> tuple[Array, Array]:
    """See `reference.rope_write`. Jitted, so that the layers of a model share one lowering."""
    num_tokens = write_page.shape[0]
    num_kv_heads, head_dim = pages.shape[2], pages.shape[4]
    half = head_dim // 2
    num_heads = parts.shape[2] // head_dim - 2 * num_kv_heads
    heads = math.gcd(num_heads, num_kv_heads, WARPS)  # of a block: none has both queries and keys
    q_blocks, kv_blocks = num_heads // heads, num_kv_heads // heads
    layout = _warp_per_row(heads, half)

    def body(
        parts_ref: Any, cos_ref: Any, sin_ref: Any, page_ref: Any, offset_ref: Any, pages_ref: Any, q_ref: Any
    ) -> None:
        # The kernel behind may come now: it waits for the end of this one before it reads what this one writes.
        plgpu.griddepcontrol_launch_dependents()
        token, block = lax.axis_index("token"), lax.axis_index("block")

        def table(ref: Any) -> Array:
            angles = plgpu.load(ref.at[token], layout=layout.reduce(0), optimized=False)
            return lax.broadcast_in_dim(angles, (heads, half), [1])

        page, offset, cos, sin = page_ref[token], offset_ref[token], table(cos_ref), table(sin_ref)
        plgpu.griddepcontrol_wait()

        def load(side: int) -> Array:
            """The first or second half of each head."""
            summands = [
                plgpu.load(
                    parts_ref.at[i, token, pl.ds(block * heads, heads), side], layout=layout, optimized=False
                ).astype(jnp.float32)
                for i in range(parts.shape[0])
            ]
            return functools.reduce(jnp.add, summands).astype(dtype)

        first, second = load(0), load(1)

        def turned() -> tuple[Array, Array]:
            a, b = first.astype(jnp.float32), second.astype(jnp.float32)
            return (a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)

        @pl.when(block < q_blocks)
        def _queries():
            for side, values in enumerate(turned()):
                q_ref[token, pl.ds(block * heads, heads), side] = values

        def write(kind: int, first_block: int, values: tuple[Array, Array]) -> None:
            place = pages_ref.at[page, kind, pl.ds((block - first_block) * heads, heads), offset]
            for side, value in enumerate(values):
                place[:, pl.ds(side * half, half)] = value

        @pl.when((block >= q_blocks) & (block < q_blocks + kv_blocks))
        def _keys():
            write(0, q_blocks, turned())

        @pl.when(block >= q_blocks + kv_blocks)
        def _values():
            write(1, q_blocks + kv_blocks, (first, second))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_tokens, num_heads, 2, half), dtype),
        grid=(num_tokens, q_blocks + 2 * kv_blocks),
        grid_names=("token", "block"),
    )
    written = jax.new_ref(pages)
    cos, sin = (each.reshape(num_tokens, half) for each in tables)
    split = parts.reshape(*parts.shape[:2], -1, 2, half)
    q = kernel(split, cos, sin, write_page, write_offset, written)
    return q.reshape(num_tokens, num_heads, head_dim), jax.freeze(written)


def _warp_per_row(rows: int, columns: int) -> Any:
    """The layout of [rows, columns] with a row for each warp, or for as many as there are rows."""
    copies = () if rows == WARPS else (fragmented_array.Replicated(WARPS // rows),)
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((rows, columns), (columns // LANES,))),
        warp_dims=copies if rows == 1 else (-3, *copies),
        lane_dims=(-2,),
        vector_dim=-1,
    )
