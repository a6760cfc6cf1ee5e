"""Attention of prompts, and parts of prompts, over paged keys and values, for Hopper.

The tokens of the batch are cut into cells of a few tokens, and a *tile* is the part of one cell that belongs to one
sequence: its tokens times the query heads of one kv head fill the 128 rows of two compute warpgroups. A third
warpgroup streams keys and values into shared memory, page by page. One persistent block runs on each SM.

A row's bits depend on its own sequence and on the shapes, not on the other sequences nor on its place in the batch:
keys come in tiles at fixed positions of the sequence, and so do the cuts where a long context is split between blocks.
A tile of keys that a row sees nothing of leaves its sums as they are.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.hopper import LOG2E
from hex_llm.kernels.paged_attention.gpu_decode_sizes import refusal
from hex_llm.kernels.paged_attention.gpu_prefill_compute import LOWEST, compute
from hex_llm.kernels.paged_attention.gpu_prefill_load import load
from hex_llm.kernels.paged_attention.gpu_prefill_plan import PrefillPlan
from hex_llm.kernels.paged_attention.gpu_prefill_sizes import ROWS, Refs, Sizes, sizes_of, swizzled
from hex_llm.kernels.paged_attention.gpu_scales import in_parts
from hex_llm.kernels.paged_attention.pages import SCALE, Pages
from hex_llm.kernels.window import Window

MEMORY = 2  # the warpgroup that loads; 0 and 1 compute
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # together at most what the launch took, or it hangs


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap"))
def prefill(
    q: Array,  # [T, N, H], rotated
    pages: Pages,  # [P, 2, K, page, H], with this step's keys and values
    page_table: Array,  # [S, B]
    plan: PrefillPlan,
    *,
    scale: float,
    window: Window | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,  # [N]
) -> Array:
    """[T, N, H]: what the planned tokens attend to. Rows of other tokens mean nothing, and may be NaN."""
    reason = refusal(q.shape, pages.shape, q.dtype, pages.dtype)
    if reason is not None:
        raise ValueError(reason)
    num_tokens = q.shape[0]
    sizes = sizes_of(q, pages, scale, window, soft_cap)
    # A copy of a whole cell needs one that is there, and a swizzled copy whole groups of 8 tokens.
    padding = max(sizes.cell, num_tokens + -num_tokens % 8) - num_tokens
    queries = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).astype(sizes.dtype)
    if sinks is not None:
        sinks = jnp.maximum(sinks.astype(jnp.float32) * LOG2E, LOWEST)[None, :]
    # Where a context is split, its parts know nothing of sinks: they join once, when the parts are merged.
    out, weights = _attend(queries, pages, page_table, plan, sizes, sinks if sizes.chunks == 1 else None)
    if weights is not None:
        out = _combine(out, weights, plan, sizes, sinks)
    return out[:num_tokens].astype(q.dtype)


def _attend(
    q: Array, pages: Pages, page_table: Array, plan: PrefillPlan, sizes: Sizes, sinks: Array | None
) -> tuple[Array, Array | None]:
    """The result [T, N, H] and None, or its parts [C, T, N, H] and their weights' log2 [tiles * C, K, ROWS]."""
    z = sizes
    blocks = min(z.blocks, plan.items.shape[0] * z.num_kv_heads)
    if sinks is not None:
        sinks = jnp.repeat(sinks.reshape(z.num_kv_heads, z.group), z.cell, axis=1)  # as the rows of a tile lie
        sinks = jnp.pad(sinks, ((0, 0), (0, ROWS - z.group * z.cell)))

    def body(*refs: Any, **scratch: Any) -> None:
        named = Refs(*refs, **scratch) if z.chunks > 1 else Refs(*refs, weights=None, **scratch)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == MEMORY)
        def _memory() -> None:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
            load(named, z, blocks)

        @pl.when(warpgroup != MEMORY)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            compute(named, z, blocks, warpgroup)

    if z.chunks > 1:
        out_type = [
            jax.ShapeDtypeStruct((z.chunks, *q.shape), jnp.float32),
            jax.ShapeDtypeStruct((plan.items.shape[0], z.num_kv_heads, ROWS), jnp.float32),
        ]
    else:
        out_type = [jax.ShapeDtypeStruct(q.shape, z.out_dtype)]
    wide, narrow = swizzled(z, z.dtype), swizzled(z, z.pages_dtype)
    arrivals = 1 if z.widened else z.parts
    scratch = {
        "q_smem": plgpu.SMEM((z.q_slots, ROWS, z.head_dim), z.dtype, transforms=wide),
        "k_smem": plgpu.SMEM((z.stages, z.kv_tile, z.head_dim), z.dtype, transforms=wide),
        "v_smem": plgpu.SMEM((z.stages, z.kv_tile, z.head_dim), z.dtype, transforms=wide),
        "out_smem": plgpu.SMEM((2, ROWS // 2, z.out_columns), z.out_dtype),
        "q_full": plgpu.Barrier(num_arrivals=z.group, num_barriers=z.q_slots),
        "q_empty": plgpu.Barrier(num_arrivals=2, num_barriers=z.q_slots),
        "k_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=z.stages),
        "k_empty": plgpu.Barrier(num_arrivals=2, num_barriers=z.stages),
        "v_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=z.stages),
        "v_empty": plgpu.Barrier(num_arrivals=2, num_barriers=z.stages),
        "landed": plgpu.Barrier(num_arrivals=z.parts, num_barriers=2),
        "turn": plgpu.Barrier(num_barriers=2),
    }
    if z.widened:
        scratch["narrow_smem"] = plgpu.SMEM((2, z.kv_tile, z.head_dim), z.pages_dtype, transforms=narrow)
    if z.scaled:
        scratch["scales_smem"] = plgpu.SMEM((z.stages, 2, z.kv_tile), SCALE)
        scratch["scales_landed"] = plgpu.Barrier(num_arrivals=z.parts, num_barriers=2)
    numbers, scales = in_parts(pages, z.part)
    out, *weights = plgpu.kernel(
        body,
        kernel_name="attention_prefill",
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Sums and maxima are of rows, which a warp has by itself: they need no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(q, numbers, scales, page_table, plan.items, plan.num_items, sinks)
    return out, weights[0] if weights else None


def _combine(parts: Array, weights: Array, plan: PrefillPlan, sizes: Sizes, sinks: Array | None) -> Array:
    """Merges the parts [C, T, N, H] of each token's result by their weights' log2 [tiles * C, K, ROWS], and sinks'."""
    num_chunks, num_tokens, num_heads, _ = parts.shape
    padding = (0, num_tokens - plan.token_tile.shape[0])
    tile, count = (jnp.pad(x, padding)[:, None] for x in (plan.token_tile, plan.token_chunks))
    token, head = jnp.arange(num_tokens)[:, None], jnp.arange(num_heads)[None, :]
    row = head % sizes.group * sizes.cell + token % sizes.cell
    exponents = [
        jnp.where(c < count, weights[tile * num_chunks + c, head // sizes.group, row], -jnp.inf)
        for c in range(num_chunks)
    ]
    largest = functools.reduce(jnp.maximum, exponents, jnp.float32(LOWEST) if sinks is None else sinks)
    shares = [jnp.exp2(exponent - largest) for exponent in exponents]
    total = jnp.maximum(functools.reduce(jnp.add, shares), 1e-30)
    if sinks is not None:
        total += jnp.exp2(sinks - largest)
    # A sum of terms, not over an axis: it becomes one elementwise kernel. Parts that nobody wrote may be NaN.
    terms = (
        jnp.where(share[..., None] > 0, part, 0) * (share / total)[..., None]
        for part, share in zip(parts, shares, strict=True)
    )
    return functools.reduce(jnp.add, terms)
