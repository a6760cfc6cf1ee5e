"""What attention on TPUs does, and the sizes that it does it in."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from hex_llm.kernels.window import Window

LANES, SUBLANES = 128, 8  # a tile of 32-bit numbers; smaller ones lie two or more to a place
LOG2_E = math.log2(math.e)
LOWEST = -1e30  # finite: what sees nothing must not make NaN

PAGES = (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn)  # the types that pages may have

# All generations have 1 MiB of scalar memory for each core, and at least 16 MiB of vector memory.
LONGEST_TABLE = 64 * 1024  # entries of a sequence's page table, of which two are in scalar memory
LONGEST_STEP = 64 * 1024  # tokens, of each of which scalar memory has two numbers while they are written
TABLE_PIECE = 1024  # entries that are copied at once
DECODE_BLOCK_BYTES, DECODE_BLOCK = 1 << 20, 512  # of keys and values, the most bytes and tokens
RING_BYTES, LONGEST_RING = 4 << 20, 4  # of keys and values that are on their way or in use
LARGEST_BLOCK_BYTES = 4 << 20
QUERIES_BYTES = 1 << 19  # of queries at a time
LARGEST_GROUP = 16  # that is no power of two
LARGEST_EVEN_GROUP = 32  # that is one: with more, 16 tokens have more rows than vector memory holds the scores of
PREFILL_BLOCK, PREFILL_ROWS, PREFILL_TOKENS = 512, 512, 256  # of keys, of queries (times heads of a group), of tokens
WRITE_BYTES = 1 << 21  # of keys and values that are to be written, and of the slabs they go to
PREFILL_BYTES = 6 << 20  # of one step's queries, sums and output


@dataclass(frozen=True)
class Sizes:
    """Everything static about the keys and values of one call."""

    num_kv_heads: int  # that are there at once
    page_size: int
    head_dim: int
    block: int  # keys that are looked at together
    ring: int  # blocks in vector memory
    table_width: int

    @property
    def part(self) -> int:
        """Tokens of one copy: a page, or as much of it as a block holds."""
        return math.gcd(self.page_size, self.block)

    @property
    def parts(self) -> int:
        return self.block // self.part

    @property
    def table_piece(self) -> int:
        return min(self.table_width, TABLE_PIECE)


def refusal(
    q_shape: tuple[int, ...], pages_shape: tuple[int, ...], table_width: int, q_dtype: Any, pages_dtype: Any
) -> str | None:
    """Why the kernels do not do these shapes, or None if they do. `table_width`: the most pages of a sequence."""
    num_heads, num_kv_heads, page_size = q_shape[1], pages_shape[2], pages_shape[3]
    if q_dtype != pages_dtype and not (q_dtype == jnp.bfloat16 and pages_dtype == jnp.float8_e4m3fn):
        return f"queries of {q_dtype} are not of the type of pages, {pages_dtype}, nor bfloat16 with float8_e4m3fn"
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads are not a multiple of {num_kv_heads} kv heads"
    group = num_heads // num_kv_heads
    if group > LARGEST_GROUP and group & (group - 1):
        return f"groups of {group} query heads are neither of at most {LARGEST_GROUP} nor a power of two"
    if group > LARGEST_EVEN_GROUP:
        return f"groups of {group} query heads are more than {LARGEST_EVEN_GROUP}"
    if table_width > LONGEST_TABLE:
        return (
            f"sequences of {table_width * page_size} tokens in blocks of {page_size} have {table_width} blocks, but a "
            f"TPU's scalar memory holds the numbers of {LONGEST_TABLE}, of {LONGEST_TABLE * page_size} tokens"
        )
    return write_refusal(pages_shape, pages_dtype)


def write_refusal(pages_shape: tuple[int, ...], dtype: Any) -> str | None:
    """Why the kernel does not write to such pages, or None if it does."""
    _, _, num_kv_heads, page_size, head_dim = pages_shape
    if dtype not in PAGES:
        return f"pages are of {dtype}, not of {', '.join(jnp.dtype(each).name for each in PAGES)}"
    if head_dim > LANES and head_dim % LANES:
        return f"head_dim is {head_dim}, neither at most {LANES} nor a multiple of it"
    if page_size < SUBLANES or page_size & (page_size - 1):  # blocks have whole pages, or pages have whole blocks
        return f"block size is {page_size}, not a power of two of at least {SUBLANES}"
    if (block := LANES * token_bytes(num_kv_heads, head_dim, dtype)) > LARGEST_BLOCK_BYTES:
        return (
            f"{LANES} keys and values of {num_kv_heads} heads of {head_dim} are {block} bytes, and a TPU's vector "
            f"memory holds two of {LARGEST_BLOCK_BYTES}"
        )
    return None


def token_bytes(num_kv_heads: int, head_dim: int, dtype: Any) -> int:
    """What the keys and values of one token take in vector memory."""
    return 2 * num_kv_heads * round_up(head_dim, LANES) * jnp.dtype(dtype).itemsize


def decode_sizes(pages_shape: tuple[int, ...], table_width: int, dtype: Any, window: Window | None) -> Sizes:
    _, _, num_kv_heads, page_size, head_dim = pages_shape
    each = token_bytes(num_kv_heads, head_dim, dtype)
    block = min(DECODE_BLOCK, _power_of_two(DECODE_BLOCK_BYTES // each))
    if window is not None:
        block = min(block, _power_of_two(window.size))
    block = max(block, LANES)
    return Sizes(num_kv_heads, page_size, head_dim, block, _ring(block * each), table_width)


def queries_at_once(num_heads: int, head_dim: int, dtype: Any) -> int:
    """Decodes whose queries are in vector memory together."""
    row = round_up(num_heads, 2 * SUBLANES) * round_up(head_dim, LANES) * jnp.dtype(dtype).itemsize
    return max(SUBLANES, QUERIES_BYTES // row // SUBLANES * SUBLANES)


def prefill_tile(num_tokens: int, group: int) -> int:
    """Tokens whose queries are looked at together: of any group, their rows fill whole tiles."""
    step = 2 * SUBLANES
    return min(max(PREFILL_ROWS // group // step * step, step), PREFILL_TOKENS, round_up(num_tokens, step))


def prefill_sizes(pages_shape: tuple[int, ...], table_width: int, rows: int, dtype: Any) -> Sizes:
    """For `rows` rows of queries for each kv head."""
    _, _, num_kv_heads, page_size, head_dim = pages_shape
    width = round_up(head_dim, LANES)
    # Queries and output twice, their sum, and what is kept of each row.
    head = rows * (4 * width * jnp.dtype(dtype).itemsize + 4 * width + 2 * 4 * LANES)
    head += 2 * PREFILL_BLOCK * token_bytes(1, head_dim, dtype)
    most = max(PREFILL_BYTES // head, 1)
    at_once = max(n for n in range(1, min(most, num_kv_heads) + 1) if num_kv_heads % n == 0)
    each = PREFILL_BLOCK * token_bytes(at_once, head_dim, dtype)
    return Sizes(at_once, page_size, head_dim, PREFILL_BLOCK, min(_ring(each), 3), table_width)


@dataclass(frozen=True)
class WriteSizes:
    tokens: int  # whose keys and values are at hand together
    ring: int  # slabs under way


def slab_rows(page_size: int, single: bool) -> int:
    """The rows of a page that are written together; few where each sequence has a single token to write."""
    return SUBLANES if single else min(page_size, 2 * SUBLANES)


def write_sizes(pages_shape: tuple[int, ...], num_tokens: int, slab: int, dtype: Any) -> WriteSizes:
    _, _, num_kv_heads, _, head_dim = pages_shape
    step = SUBLANES * 2
    tokens = WRITE_BYTES // token_bytes(num_kv_heads, head_dim, jnp.float32) // step * step
    slab_bytes = slab * token_bytes(num_kv_heads, head_dim, dtype)
    return WriteSizes(min(max(tokens, step), round_up(num_tokens, step)), min(max(WRITE_BYTES // slab_bytes, 4), 64))


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _power_of_two(number: int) -> int:
    """The largest that is not larger."""
    return 1 << max(number.bit_length() - 1, 0)


def _ring(block_bytes: int) -> int:
    return min(max(RING_BYTES // block_bytes, 2), LONGEST_RING)
