"""Decode attention for Hopper in Mosaic GPU: one query token a sequence against its pages, at the memory's speed.

A *row* is a sequence and one of its kv heads; its context is read in *tiles* of tokens. Each row is cut into *chunks*
of tiles, and the chunks of all rows, laid end to end, are dealt to persistent CTAs, one per SM, in shares of nearly
equal length. In a CTA one warpgroup streams pages into a ring in shared memory and never stops between chunks; others,
the *workers*, multiply on the tensor cores. Two workers take the chunks in turn, so that one finishes a chunk while the
other has begun the next. They write each chunk's own softmax average and log2-sum-exp; a second, small kernel merges a
row's chunks.

Which side of a product the queries are on is chosen by shape: `gpu_decode_rows` and `gpu_decode_columns`.

The kernel begins while the one in front, which writes the last tokens' keys and values, still runs (see `chain`): until
that has ended it reads the plan, the page table and the tokens before.

How a row is cut follows from its own length and the shapes alone, and its chunks are merged in order. So a row's
result has the same bits whatever else is in the batch; which CTA computes a chunk changes nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.hopper import MMA_ROWS
from hex_llm.kernels.paged_attention import gpu_decode_merge_rows
from hex_llm.kernels.paged_attention.gpu_decode_chunks import Refs
from hex_llm.kernels.paged_attention.gpu_decode_columns import attend_columns
from hex_llm.kernels.paged_attention.gpu_decode_load import load
from hex_llm.kernels.paged_attention.gpu_decode_merge import merge
from hex_llm.kernels.paged_attention.gpu_decode_plan import DEFAULT, DecodePlan, Tuning, plan_decode, tuning_for
from hex_llm.kernels.paged_attention.gpu_decode_rows import attend_rows
from hex_llm.kernels.paged_attention.gpu_decode_sizes import Q_SLOTS, SWIZZLE_ROWS, Sizes, refusal, sizes_of
from hex_llm.kernels.paged_attention.gpu_decode_tile import Softmax
from hex_llm.kernels.paged_attention.gpu_key_order import KeyOrdered, in_key_order
from hex_llm.kernels.paged_attention.gpu_scales import in_parts
from hex_llm.kernels.paged_attention.pages import SCALE, Pages
from hex_llm.kernels.quant_matmul.rows import EightBits, Rows
from hex_llm.kernels.window import Window

__all__ = ["DEFAULT", "DecodePlan", "Tuning", "decode", "plan_decode", "refusal", "takes_key_order", "tuning_for"]


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "out_rows", "tuning"))
def decode(
    q: Array | KeyOrdered,  # [S, N, H]
    pages: Pages,  # [P, 2, K, page, H]
    page_table: Array,  # [S, B] int32
    plan: DecodePlan,
    *,
    scale: float,
    window: Window | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,  # [N]
    out_rows: int | None = None,
    eight_bits: EightBits | None = None,
    tuning: Tuning | None = None,
) -> Array | Rows:
    """Attention [S, N, H] of each sequence's last token to its tokens in the window; 0 where it has none.

    With `out_rows`, rows of zeros follow up to that number. With `eight_bits`, it may come as [S, N * H] in those. The
    plan is for the same tuning. Jitted, so that the layers
    of a model share one lowering.
    """
    if (reason := refusal(q.shape, pages.shape, q.dtype, pages.dtype)) is not None:
        raise ValueError(f"decode attention: {reason}")
    sizes = sizes_of(q, pages, tuning or tuning_for(q.shape[2], pages.dtype))
    softmax = Softmax(scale=scale, window=window, soft_cap=soft_cap)
    averages, exponents = _attend(q, pages, page_table, plan, sizes, softmax)
    rows = out_rows or q.shape[0]
    if eight_bits is not None and gpu_decode_merge_rows.supports(sizes):
        return gpu_decode_merge_rows.merge_rows(averages, exponents, plan, sizes, rows, sinks, eight_bits)
    return merge(averages, exponents, plan, sizes, rows, sinks).reshape(rows, *q.shape[1:])


def takes_key_order(q: Any, pages: Any) -> bool:
    """Whether queries of this shape and type may come as `KeyOrdered`."""
    if refusal(q.shape, pages.shape, q.dtype, pages.dtype) is not None:
        return False
    sizes = sizes_of(q, pages, tuning_for(q.shape[2], pages.dtype))
    return sizes.in_registers and not sizes.padded


def _swizzled(columns: int, dtype: Any) -> tuple:
    """The layout in shared memory that TMA writes and wgmma reads, for rows of `columns`."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next(s for s in (128, 64, 32) if columns * itemsize % s == 0)
    tiling = plgpu.TilingTransform((SWIZZLE_ROWS, swizzle // itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def _attend(
    q: Array | KeyOrdered, pages: Pages, page_table: Array, plan: DecodePlan, sizes: Sizes, softmax: Softmax
) -> tuple[Array, Array]:
    """Every chunk's average [rows, max_chunks, G, H] and log2-sum-exp [rows, max_chunks, MMA_ROWS]."""
    z = sizes
    queries = q.values if isinstance(q, KeyOrdered) else _as_multiplied(q, z)
    attend = attend_columns if z.turned else attend_rows
    numbers, scales = in_parts(pages, z.part)

    def swizzled(*shape: int, dtype: Any) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=_swizzled(shape[-1], dtype))

    if z.turned:
        of_group, weights = (z.q_rows, z.head_dim), swizzled(z.workers, z.q_rows, z.tile, dtype=z.dtype)
        staged = z.q_rows, z.head_dim
    else:
        of_group, weights = (MMA_ROWS, z.head_dim), None
        staged = MMA_ROWS, z.out_columns

    def body(*refs: Any) -> None:
        # The kernel behind may come now: it waits for the end of this one before it reads what this one writes.
        plgpu.griddepcontrol_launch_dependents()
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(functools.partial(load, Refs(*refs), z))
        pl.when(warpgroup > 0)(functools.partial(attend, Refs(*refs), z, softmax, warpgroup - 1))

    return plgpu.kernel(
        body,
        kernel_name="attention_decode",
        out_type=[
            jax.ShapeDtypeStruct((z.rows, z.max_chunks, z.group, z.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((z.rows, z.max_chunks, MMA_ROWS), jnp.float32),
        ],
        grid=(plan.shares.shape[0] - 1,),
        grid_names=("core",),
        num_threads=1 + z.workers,
        thread_name="warpgroup",
        scratch_types=[
            swizzled(Q_SLOTS, *of_group, dtype=z.dtype),
            plgpu.SMEM((z.workers, *staged), jnp.float32),
            weights,
            swizzled(z.slots, 2, z.tile, z.head_dim, dtype=z.pages_dtype),
            plgpu.SMEM((z.slots, 2, z.tile), SCALE) if z.scaled else None,
            swizzled(z.workers, 2, z.tile, z.head_dim, dtype=z.dtype) if z.widened else None,
            plgpu.Barrier(num_arrivals=z.copies, num_barriers=z.slots),
            plgpu.Barrier(num_arrivals=z.workers, num_barriers=z.slots),
            plgpu.Barrier(num_arrivals=z.q_rows // SWIZZLE_ROWS, num_barriers=Q_SLOTS),
            plgpu.Barrier(num_arrivals=z.workers, num_barriers=Q_SLOTS),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(
        queries.reshape(-1, SWIZZLE_ROWS, z.head_dim),
        numbers,
        scales,
        page_table,
        plan.sequences,
        plan.shares,
    )


def _as_multiplied(q: Array, z: Sizes) -> Array:
    if z.padded:
        q = q.reshape(z.rows, z.group, z.head_dim)
        q = jnp.pad(q, ((0, 0), (0, z.q_rows - z.group), (0, 0)))
    q = q.astype(z.dtype)
    return in_key_order(q) if z.in_registers else q
