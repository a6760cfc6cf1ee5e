"""Small batches on Hopper: each layer is a chain of our kernels, every one of which begins before the one in front of
it has ended. What a kernel of it does not do goes the plain way.

Before the one in front has ended, a kernel reads what none in front of it can still be writing: weights, the pairs of
adapters, which other programs write, what a step is about (page table, plan, angles, whose adapter a token has), which
is computed before the first layer, and the pages, but for this step's tokens.
That is safe because no kernel, of XLA's neither, ends before the one in front of it has, and because a product lets the
next kernel begin only after it has waited itself: all that came before the product has then ended.
"""

from typing import Any

import jax.numpy as jnp

from hex_llm.kernels.hopper import MMA_ROWS, is_hopper
from hex_llm.parallel.manual import is_split

MAX_TOKENS = 128  # with more, cuBLAS's products are the faster
ROWS = 8  # a product takes and gives a multiple of so many rows
INT8_ROWS = 16  # and one of whole numbers such a multiple, if there are more than 32: the tensor cores have no other


def chained(tokens: int) -> bool:
    """Whether a batch of so many tokens runs as a chain where the kernels do its shapes. Where devices share the work
    it does not: their sums stand between the kernels, and whether one may begin ahead of those nobody has measured."""
    return is_hopper() and tokens <= MAX_TOKENS and not is_split()


def padded(tokens: int, dtype: Any = jnp.bfloat16) -> int:
    """The rows that a product of so many tokens of a type takes and gives."""
    unit = INT8_ROWS if dtype == jnp.int8 and tokens > 32 else ROWS
    return -(-tokens // unit) * unit


def whole(q: Any, pages: Any, *, embed: int, mlp: int) -> bool:
    """Whether the kernels do all of layers with queries [T, N, H] and pages of these shapes.

    Of biases they take those of queries, keys and values only, and of activations silu and gelu.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = pages.shape[2]
    if not chained(tokens):
        return False
    # Imported where it is used: Pallas takes a second, which a start on a CPU has better use for.
    from hex_llm.kernels.matmul import add_norm_gpu
    from hex_llm.kernels.paged_attention.gpu_decode_sizes import refusal
    from hex_llm.kernels.rope_write import gpu as rope_write_gpu

    sizes = (embed, mlp, heads * head_dim, kv_heads * head_dim)
    return (
        refusal(q.shape, pages.shape, q.dtype, pages.dtype) is None
        and not any(size % MMA_ROWS for size in sizes)
        and add_norm_gpu.supports(embed)
        and rope_write_gpu.does_heads_of(head_dim)
    )
