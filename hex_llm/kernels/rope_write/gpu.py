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
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.gpu_warps import LANES, WARPS, copies, warp_per_row
from hex_llm.kernels.paged_attention import gpu_key_order
from hex_llm.kernels.paged_attention.gpu_decode import takes_key_order
from hex_llm.kernels.paged_attention.gpu_decode_sizes import multiplied_dtype
from hex_llm.kernels.paged_attention.gpu_key_order import KeyOrdered
from hex_llm.kernels.paged_attention.pages import INT8_LARGEST, SCALE, Pages, Scaled, rounded, whole_numbers
from hex_llm.kernels.rms import Rms

PAGES = (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)  # the types that it writes


def supports(parts: Array, pages: Pages, dtype: jnp.dtype) -> bool:
    head_dim = pages.shape[4]
    return dtype == jnp.bfloat16 and pages.dtype in PAGES and does_heads_of(head_dim) and parts.shape[2] % head_dim == 0


def does_heads_of(head_dim: int) -> bool:
    """Whether halves of a head can be dealt to the lanes of a warp, or to half of them."""
    return head_dim % LANES == 0


@functools.partial(jax.jit, static_argnames=("dtype", "rms", "decode"))
def rope_write(
    parts: Array,
    tables: tuple[Array, Array] | None,
    pages: Pages,
    write_page: Array,
    write_offset: Array,
    dtype: jnp.dtype,
    *,
    bias: Array | None = None,
    norms: tuple[Array, Array] | None = None,
    rms: Rms | None = None,
    decode: bool = False,
) -> tuple[Array | KeyOrdered, Pages]:
    """See `reference.rope_write`; for decodes, the queries may come in the order of keys. Jitted, so that the layers of
    a model share one lowering."""
    num_tokens = write_page.shape[0]
    num_kv_heads, head_dim = pages.shape[2], pages.shape[4]
    half = head_dim // 2
    num_heads = parts.shape[2] // head_dim - 2 * num_kv_heads
    heads = math.gcd(num_heads, num_kv_heads, WARPS)  # of a block: none has both queries and keys
    q_blocks, kv_blocks = num_heads // heads, num_kv_heads // heads
    shape = jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), dtype)
    in_key_order = decode and takes_key_order(shape, pages)
    layout = plain_layout = warp_per_row(heads, half)
    if in_key_order:
        warps = copies(WARPS // heads)
        layout, plain_layout = (
            gpu_key_order.layout(heads, half, warps=warps, ordered=ordered) for ordered in (True, False)
        )

    def body(
        parts_ref: Any,
        table_refs: Any,
        bias_ref: Any,
        norm_refs: Any,
        page_ref: Any,
        offset_ref: Any,
        pages_ref: Any,
        q_ref: Any,
    ) -> None:
        # The kernel behind may come now: it waits for the end of this one before it reads what this one writes.
        plgpu.griddepcontrol_launch_dependents()
        token, block = lax.axis_index("token"), lax.axis_index("block")
        rows = pl.ds(block * heads, heads)

        def load(ref: Any) -> Array:
            return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

        def for_each_head(ref: Any) -> Array:
            """[half] of a token or of all tokens, which is the same for all heads."""
            values = plgpu.load(ref, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
            return lax.broadcast_in_dim(values, (heads, half), [1])

        page, offset = page_ref[token], offset_ref[token]
        angles = None if table_refs is None else [for_each_head(ref.at[token]) for ref in table_refs]
        scales = None
        if norm_refs is not None:
            of_queries, of_keys = ([for_each_head(ref.at[side]) for side in range(2)] for ref in norm_refs)
            is_query = lax.broadcast(block < q_blocks, (heads, half))
            scales = [jnp.where(is_query, q, k) for q, k in zip(of_queries, of_keys, strict=True)]
        biases = None if bias_ref is None else [load(bias_ref.at[rows, side]) for side in range(2)]
        plgpu.griddepcontrol_wait()

        def loaded(side: int) -> Array:
            """The first or second half of each head."""
            summands = [load(parts_ref.at[i, token, rows, side]) for i in range(parts.shape[0])]
            if biases is not None:
                summands.append(biases[side])
            return functools.reduce(jnp.add, summands).astype(dtype)

        def normed(halves: list[Array], scales: list[Array]) -> list[Array]:
            assert rms is not None, "norms need to be told how"
            wide = [each.astype(jnp.float32) for each in halves]
            squares = sum(jnp.sum(each * each, axis=1) for each in wide)
            factor = lax.broadcast_in_dim(lax.rsqrt(squares / head_dim + rms.eps), (heads, half), [0])
            if rms.plus_one:
                return [(each * factor * (1 + scale)).astype(dtype) for each, scale in zip(wide, scales, strict=True)]
            rounded = [(each * factor).astype(dtype).astype(jnp.float32) for each in wide]
            return [(each * scale).astype(dtype) for each, scale in zip(rounded, scales, strict=True)]

        plain = [loaded(0), loaded(1)]

        def turned() -> list[Array]:
            halves = plain if scales is None else normed(plain, scales)
            if angles is None:
                return halves
            (a, b), (cos, sin) = (each.astype(jnp.float32) for each in halves), angles
            return [(a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)]

        @pl.when(block < q_blocks)
        def _queries():
            for side, values in enumerate(turned()):
                values = values.astype(q_ref.dtype)
                if in_key_order:
                    values = gpu_key_order.renamed(values, layout, plain_layout)
                q_ref[token, rows, side] = values

        def write(kind: int, first_block: int, halves: list[Array]) -> None:
            numbers_ref: Any
            place = page, kind, pl.ds((block - first_block) * heads, heads), offset
            if isinstance(pages_ref, Scaled):
                wide = [each.astype(SCALE) for each in halves]
                largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(each), axis=1) for each in wide])
                scales = largest / INT8_LARGEST
                pages_ref.scales[place] = scales
                kept = [whole_numbers(each, lax.broadcast_in_dim(scales, each.shape, [0])) for each in wide]
                numbers_ref = pages_ref.numbers.at[place]
            else:
                kept, numbers_ref = [rounded(each, pages_ref.dtype) for each in halves], pages_ref.at[place]
            for side, values in enumerate(kept):
                numbers_ref[:, pl.ds(side * half, half)] = values

        @pl.when((block >= q_blocks) & (block < q_blocks + kv_blocks))
        def _keys():
            write(0, q_blocks, turned())

        @pl.when(block >= q_blocks + kv_blocks)
        def _values():
            write(1, q_blocks + kv_blocks, plain)

    kernel = plgpu.kernel(
        body,
        kernel_name="rope_write",
        out_type=jax.ShapeDtypeStruct(
            (num_tokens, num_heads, 2, half), multiplied_dtype(pages.dtype) if in_key_order else dtype
        ),
        grid=(num_tokens, q_blocks + 2 * kv_blocks),
        grid_names=("token", "block"),
    )
    written = jax.tree.map(jax.new_ref, pages)
    split = parts.reshape(*parts.shape[:2], -1, 2, half)
    q = kernel(
        split,
        None if tables is None else tuple(each.reshape(num_tokens, half) for each in tables),
        None if bias is None else bias.reshape(-1, 2, half),
        None if norms is None else tuple(each.reshape(2, half) for each in norms),
        write_page,
        write_offset,
        written,
    )
    q = q.reshape(num_tokens, num_heads, head_dim)
    return KeyOrdered(q) if in_key_order else q, jax.tree.map(jax.freeze, written)
