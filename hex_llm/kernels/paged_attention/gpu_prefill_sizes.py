"""The sizes of one prefill attention on Hopper, and the memory its warpgroups share."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.paged_attention.gpu_decode_sizes import multiplied_dtype
from hex_llm.kernels.paged_attention.gpu_prefill_plan import ITEM, ROWS, geometry
from hex_llm.kernels.paged_attention.pages import SCALE, Pages
from hex_llm.kernels.window import Window

SHARED_MEMORY = 226 << 10  # bytes a block may use, less some for barriers
OUT_BYTES = 32 << 10  # of the staged output
COPY_ALIGNMENT = 128  # bytes: where a copy may begin in shared memory
MOST_STAGES = 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Everything static about one call."""

    blocks: int  # that run at once
    chunks: int  # of a context, at most
    group: int  # query heads of a kv head
    num_kv_heads: int
    head_dim: int
    page_size: int
    cell: int  # tokens of a tile
    kv_tile: int  # keys of a tile
    part: int  # keys of one copy
    q_slots: int
    stages: int  # tiles of keys and values in shared memory
    out_columns: int  # of the output that are staged at once
    dtype: Any  # of what is multiplied
    pages_dtype: Any
    out_dtype: Any
    scale: float
    window: Window | None
    soft_cap: float | None

    @property
    def parts(self) -> int:
        return self.kv_tile // self.part

    @property
    def parts_per_page(self) -> int:
        return self.page_size // self.part

    @property
    def swizzled_columns(self) -> int:
        """Of a tile in shared memory; of 128 bytes where head_dim and 16 bits allow it."""
        return 64 if self.head_dim % 64 == 0 else 32

    @property
    def out_starts(self) -> tuple[int, ...]:
        """The columns where the staged parts of the output begin; the last two may overlap, with the same content."""
        starts = range(0, self.head_dim, self.out_columns)
        return tuple(min(start, self.head_dim - self.out_columns) for start in starts)

    @property
    def widened(self) -> bool:
        """Do pages hold 8-bit numbers, which are widened before they are multiplied?"""
        return self.pages_dtype != self.dtype

    @property
    def scaled(self) -> bool:
        """Do pages have scales?"""
        return self.pages_dtype == jnp.int8


class Refs(NamedTuple):
    q: Any  # [T, N, H]
    pages: Any  # [P * 2 * K * parts per page, part, H]
    scales: Any  # [P * 2 * K * parts per page, part]; None where pages have none
    table: Any  # [S, B]
    items: Any
    num_items: Any
    sinks: Any  # [K, ROWS] float32, to base 2; None where there are none, or what is split is merged elsewhere
    out: Any  # [T, N, H], or [C, T, N, H]
    weights: Any  # [tiles * C, K, ROWS]: log2 of the sums of weights; None where nothing is split
    q_smem: Any
    k_smem: Any
    v_smem: Any
    out_smem: Any  # [warpgroup, row, column]
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    landed: Any  # keys (0) and values (1) that the loading warpgroup itself waits for
    turn: Any  # of each compute warpgroup to multiply
    narrow_smem: Any = None  # [2, kv_tile, H]: 8-bit keys and values
    scales_smem: Any = None  # [stages, 2, kv_tile], where pages have scales
    scales_landed: Any = None  # as `landed`


def sizes_of(q: Array, pages: Pages, scale: float, window: Window | None, soft_cap: float | None) -> Sizes:
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = pages.shape
    cut = geometry(num_tokens, num_heads, num_kv_heads, head_dim)
    dtype = multiplied_dtype(pages.dtype)
    out_dtype = jnp.dtype(jnp.float32 if cut.chunks > 1 else q.dtype)
    columns = _out_columns(head_dim, out_dtype.itemsize)
    slot, stage = ROWS * head_dim * 2, 2 * cut.kv_tile * head_dim * 2
    free = SHARED_MEMORY - ROWS * columns * out_dtype.itemsize
    if dtype != pages.dtype:
        free -= 2 * cut.kv_tile * head_dim
    if pages.dtype == jnp.int8:
        stage += 2 * cut.kv_tile * jnp.dtype(SCALE).itemsize
    q_slots = 2 if free >= 2 * slot + 2 * stage else 1
    assert free >= q_slots * slot + stage, "a tile of keys and values does not fit into shared memory"
    return Sizes(
        blocks=cut.blocks,
        chunks=cut.chunks,
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        cell=cut.tokens,
        kv_tile=cut.kv_tile,
        part=math.gcd(page_size, cut.kv_tile),
        q_slots=q_slots,
        stages=min((free - q_slots * slot) // stage, MOST_STAGES),
        out_columns=columns,
        dtype=dtype,
        pages_dtype=jnp.dtype(pages.dtype),
        out_dtype=out_dtype,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )


def _out_columns(head_dim: int, itemsize: int) -> int:
    """As many as fit. A token may be the first of a copy, so each row begins where one may."""
    return next(
        columns
        for columns in (head_dim, 128, 64)
        if columns <= head_dim and ROWS * columns * itemsize <= OUT_BYTES and columns * itemsize % COPY_ALIGNMENT == 0
    )


def swizzled(sizes: Sizes, dtype: Any) -> tuple:
    """The layout in shared memory that TMA writes and wgmma reads."""
    tiling = plgpu.TilingTransform((8, sizes.swizzled_columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(sizes.swizzled_columns * dtype.itemsize)  # pyright: ignore[reportAbstractUsage]
    return tiling, swizzle


def for_each_item(
    refs: Refs, sizes: Sizes, blocks: int, function: Callable[[Array, dict[str, Array], Array, Array], Array]
) -> None:
    """Calls function(n, item, head, step) -> step for each of this block's items, the n-th of them."""
    block = lax.axis_index("block")
    work = refs.num_items[0] * sizes.num_kv_heads

    def nth(n: Array) -> Array:
        """Every other round goes backwards, so that long and short items pair up."""
        return n * blocks + jnp.where(lax.rem(n, 2) == 0, block, blocks - 1 - block)

    def one(n: Array, step: Array) -> Array:
        row = lax.div(nth(n), sizes.num_kv_heads)
        item = {name: refs.items[row, i] for i, name in enumerate(ITEM)}
        return function(n, item, lax.rem(nth(n), sizes.num_kv_heads), step)

    rounds = lax.div(work, blocks)
    rounds += (nth(rounds) < work).astype(jnp.int32)
    lax.fori_loop(0, rounds, one, jnp.int32(0))
