"""The sizes of one decode attention on Hopper, as its kernels need them, and which of them they do."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from hex_llm.kernels.hopper import MMA_ROWS
from hex_llm.kernels.paged_attention.gpu_decode_plan import Tuning, max_chunks
from hex_llm.kernels.paged_attention.pages import SCALE

SWIZZLE_ROWS = 8  # rows of one swizzled tile in shared memory
Q_SLOTS = 2  # queries of this chunk and of the next
SHARED_MEMORY = 226 * 1024  # bytes a CTA may use, less some for barriers
REDUCTION_BYTES = 2048  # what Pallas takes for a sum or a maximum over all warps
RING, TURNED_RING = 128 * 1024, 192 * 1024  # bytes of keys and values under way, if they fit
HEAD_DIMS = (64, 96, 128, 256)
LARGEST_GROUP = 16
PAGES = (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Everything static about one call."""

    num_seqs: int
    num_kv_heads: int
    group: int  # query heads of a kv head
    head_dim: int
    page_size: int
    q_rows: int  # rows that are copied for one group: a multiple of a swizzled tile's
    padded: bool  # each group has q_rows of its own; otherwise neighbours share them
    turned: bool  # queries are the columns of products; otherwise their rows
    in_registers: bool  # pages hold 8-bit numbers, which become 16-bit ones in registers
    tile: int
    slots: int
    workers: int  # warpgroups that multiply
    out_columns: int  # of the staged output
    dtype: Any  # of what is multiplied
    pages_dtype: Any

    @property
    def rows(self) -> int:
        return self.num_seqs * self.num_kv_heads

    @property
    def part(self) -> int:
        """Tokens of one copy: a page, or a part of it that tiles hold whole."""
        return math.gcd(self.page_size, self.tile)

    @property
    def widened(self) -> bool:
        """Do pages hold 8-bit numbers, which go through shared memory once more, in 16 bits?"""
        return self.pages_dtype != self.dtype and not self.in_registers

    @property
    def scaled(self) -> bool:
        """Do pages have scales?"""
        return self.pages_dtype == jnp.int8

    @property
    def copies(self) -> int:
        """What a tile takes: of each part the keys and the values, and the scales of either."""
        return self.tile // self.part * (4 if self.scaled else 2)

    @property
    def load_registers(self) -> int:
        """Of a thread that loads. Beside two workers there are no more; beside one, enough for the places of scales."""
        return 40 if self.workers > 1 else 56

    @property
    def max_chunks(self) -> int:
        return max_chunks(self.rows)

    def first_q_block(self, row: Array) -> Array:
        """The first of the blocks of SWIZZLE_ROWS query heads that hold a row's group."""
        if self.padded:
            return row * (self.q_rows // SWIZZLE_ROWS)
        block = lax.div(row * self.group, SWIZZLE_ROWS)
        if self.group % SWIZZLE_ROWS == 0 or SWIZZLE_ROWS % self.group == 0:
            return block
        return jnp.minimum(block, (self.rows * self.group - self.q_rows) // SWIZZLE_ROWS)

    def first_q_row(self, row: Array) -> Array | int:
        """Where a row's group begins in its q_rows."""
        return 0 if self.padded else row * self.group - SWIZZLE_ROWS * self.first_q_block(row)


def refusal(q_shape: tuple[int, ...], pages_shape: tuple[int, ...], q_dtype: Any, pages_dtype: Any) -> str | None:
    """Why the kernels do not do these shapes, or None if they do."""
    _, num_heads, head_dim = q_shape
    _, _, num_kv_heads, page_size, _ = pages_shape
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}, not one of {', '.join(map(str, HEAD_DIMS))}"
    if num_heads % num_kv_heads or num_heads // num_kv_heads > LARGEST_GROUP:
        return f"{num_heads} query heads for {num_kv_heads} kv heads are not groups of at most {LARGEST_GROUP}"
    if page_size % SWIZZLE_ROWS or (64 % page_size and page_size % 64):
        return f"page size is {page_size}, not 8, 16, 32 or a multiple of 64"
    if q_dtype != jnp.bfloat16 or pages_dtype not in PAGES:
        known = ", ".join(jnp.dtype(each).name for each in PAGES)
        return f"queries of {q_dtype} with pages of {pages_dtype} are not bfloat16 with one of {known}"
    return None


def sizes_of(q: Any, pages: Any, tuning: Tuning) -> Sizes:
    """Of queries and pages, or of what has their shapes."""
    num_seqs, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = pages.shape
    group = num_heads // num_kv_heads
    # Queries are copied in blocks, which groups may straddle. With few heads in all, each gets blocks of its own.
    q_rows = _whole_blocks(group + SWIZZLE_ROWS - math.gcd(group, SWIZZLE_ROWS))
    padded = bool(num_seqs * num_heads % SWIZZLE_ROWS) or q_rows > num_seqs * num_heads
    if padded:
        q_rows = _whole_blocks(group)
    dtype = multiplied_dtype(pages.dtype)
    narrow = pages.dtype != dtype
    turned = head_dim > 128 or (narrow and head_dim % MMA_ROWS == 0) if tuning.turned is None else tuning.turned
    in_registers = narrow and turned
    workers, out_columns = 1 if turned else tuning.workers, head_dim if head_dim <= 128 else 64
    if turned:
        fixed = q_rows * (Q_SLOTS * dtype.itemsize * head_dim + 4 * head_dim + dtype.itemsize * tuning.tile)
        fixed += REDUCTION_BYTES
    else:
        fixed = MMA_ROWS * (Q_SLOTS * dtype.itemsize * head_dim + workers * 4 * out_columns)
    if narrow and not in_registers:
        fixed += workers * 2 * tuning.tile * head_dim * dtype.itemsize
    slot = 2 * tuning.tile * head_dim * pages.dtype.itemsize
    wanted = tuning.slots or (TURNED_RING if turned else RING) // slot
    if pages.dtype == jnp.int8:
        slot += 2 * tuning.tile * jnp.dtype(SCALE).itemsize
    return Sizes(
        num_seqs=num_seqs,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        q_rows=q_rows,
        padded=padded,
        turned=turned,
        in_registers=in_registers,
        tile=tuning.tile,
        slots=min(wanted, (SHARED_MEMORY - fixed) // slot),
        workers=workers,
        out_columns=out_columns,
        dtype=dtype,
        pages_dtype=pages.dtype,
    )


def multiplied_dtype(pages_dtype: Any) -> Any:
    """Of keys and values in products: fp8 is widened to float16, which takes one instruction for two numbers. int8
    becomes bfloat16: beside it are weights times scales, which may be too small for float16."""
    return jnp.dtype(jnp.float16 if pages_dtype == jnp.float8_e4m3fn else jnp.bfloat16)


def _whole_blocks(rows: int) -> int:
    return pl.cdiv(rows, SWIZZLE_ROWS) * SWIZZLE_ROWS
