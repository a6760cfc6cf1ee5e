"""Where the copies of the Hopper kernels begin in shared memory: a misaligned one stops the GPU, and no simulator."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.paged_attention.gpu_decode import decode, plan_decode
from hex_llm.kernels.paged_attention.gpu_decode_sizes import HEAD_DIMS
from hex_llm.kernels.paged_attention.gpu_prefill import prefill
from hex_llm.kernels.paged_attention.gpu_prefill_plan import geometry, plan_prefill
from hex_llm.kernels.paged_attention.pages import rounded
from hex_llm.kernels.quant_matmul import gpu, gpu_layout, gpu_w4a8_layout
from hex_llm.kernels.quant_matmul.gpu_plan import Plan
from hex_llm.kernels.quant_matmul.weight import Codes, Coding

BUFFER_ALIGNMENT = 1024  # bytes: where Pallas begins each buffer
PLAIN_ALIGNMENT = 128  # what a copy wants of memory that is not swizzled
RUN_ALIGNMENT = 16  # and where the bytes also lie in one run of global memory, if Mosaic knows them to be there
SWIZZLED_ROWS = 8  # a swizzle repeats after these, and a copy has to begin where it does
DTYPES = (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)


def is_one_run(ref: Any) -> bool:
    """Whether a part of an array lies in one run of memory: nothing that is left out lies between."""
    [indexer] = [t for t in ref.transforms if hasattr(t, "indices")]
    sizes = [index.size if isinstance(index, pl.Slice) else 1 for index in indexer.indices]
    first = next((i for i, size in enumerate(sizes) if size > 1), len(sizes))
    return tuple(sizes[first + 1 :]) == tuple(indexer.shape[first + 1 :])


def alignment_of(ref: Any, run: bool = False) -> tuple[int, int]:
    """What surely divides the address of a part of a buffer, and what has to."""
    swizzle = next((t.swizzle for t in ref.transforms if hasattr(t, "swizzle")), None)
    indexers = [t for t in ref.transforms if hasattr(t, "indices")]
    shape = indexers[0].shape if indexers else ref.shape
    itemsize = jnp.dtype(ref.dtype).itemsize
    divisor, dimensions = BUFFER_ALIGNMENT, range(len(shape))
    for indexer in indexers:
        kept = []
        for dimension, index in zip(dimensions, indexer.indices, strict=True):
            is_slice = isinstance(index, pl.Slice)
            start = index.start if is_slice else index
            known = isinstance(start, int)
            if swizzle and dimension >= len(shape) - 2:  # between these rows and columns the bytes lie otherwise
                whole = SWIZZLED_ROWS if dimension == len(shape) - 2 else swizzle // itemsize
                assert known, "a copy to or from swizzled memory begins anywhere"
                assert start % whole == 0
            stride = itemsize * math.prod(shape[dimension + 1 :])
            divisor = math.gcd(divisor, start * stride if known else stride)
            if is_slice:
                kept.append(dimension)
        dimensions = kept
    if swizzle:
        return divisor, SWIZZLED_ROWS * swizzle
    return divisor, RUN_ALIGNMENT if run else PLAIN_ALIGNMENT


@pytest.fixture
def copies(monkeypatch):
    """The alignments of all copies of the kernels that are traced."""
    found = []

    def record(function, place):
        def copy(*args, **options):
            in_bounds = options.get("oob_mode") == plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            found.append(alignment_of(args[place], in_bounds and is_one_run(args[1 - place])))
            return function(*args, **options)

        return copy

    for name, place in (("copy_gmem_to_smem", 1), ("copy_smem_to_gmem", 0)):
        monkeypatch.setattr(plgpu, name, record(getattr(plgpu, name), place))
    jax.clear_caches()
    yield found
    jax.clear_caches()


def arrays(tokens, heads, kv_heads, head_dim, page_size, dtype):
    q = jax.ShapeDtypeStruct((tokens, heads, head_dim), jnp.bfloat16)
    pages = jax.eval_shape(lambda: rounded(jnp.zeros((9, 2, kv_heads, page_size, head_dim)), dtype))
    return q, pages, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 40), (5,), (4,)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("group", "page_size"), [(1, 64), (3, 8)])
@pytest.mark.parametrize("split", [False, True])
def test_copies_of_prefill_are_aligned(copies, head_dim, group, page_size, dtype, split):
    tokens, heads = 136 if split else 16384, 2 * group
    assert (geometry(tokens, heads, 2, head_dim).chunks > 1) == split

    def attend(q, pages, table, cu_q, kv_len):
        sizes: dict = {"num_tokens": tokens, "num_heads": heads, "num_kv_heads": 2, "head_dim": head_dim}
        return prefill(q, pages, table, plan_prefill(cu_q, kv_len, 0, 4, **sizes), scale=1.0)

    jax.eval_shape(attend, *arrays(tokens, heads, 2, head_dim, page_size, dtype))
    assert copies
    assert all(divisor % wanted == 0 for divisor, wanted in copies)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("group", "page_size"), [(2, 8), (7, 256)])
def test_copies_of_decode_are_aligned(copies, head_dim, group, page_size, dtype):
    def attend(q, pages, table, _, kv_len):
        plan = plan_decode(kv_len, num_kv_heads=4, num_cores=8)
        return decode(q, pages, table, plan, scale=1.0)

    jax.eval_shape(attend, *arrays(4, 4 * group, 4, head_dim, page_size, dtype))
    assert copies
    assert all(divisor % wanted == 0 for divisor, wanted in copies)


PLANS = [Plan(workers=1, stack=1, splits=2), Plan(workers=2, stack=2), Plan(workers=2, stack=1, even=True)]


@pytest.mark.parametrize("coding", ["int4", "w4a8"])
@pytest.mark.parametrize("tokens", [1, 24, 72, 128, 300])
@pytest.mark.parametrize("plan", PLANS)
def test_copies_of_products_are_aligned(copies, coding: Coding, tokens, plan):
    if tokens > gpu.MAX_TOKENS:
        plan = Plan(workers=2, stack=1, tokens=80)
    layout = gpu_w4a8_layout if coding == "w4a8" else gpu_layout
    scale = jax.ShapeDtypeStruct((512, 4), jnp.float32)
    codes = Codes(jax.ShapeDtypeStruct((512, 512), jnp.uint8), scale, scale, None, None, coding)
    x, weight = jax.ShapeDtypeStruct((tokens, 512), jnp.bfloat16), jax.eval_shape(layout.pack, codes)
    jax.eval_shape(lambda x, weight: gpu.matmul(x, weight, plan=plan), x, weight)
    assert copies
    assert all(divisor % wanted == 0 for divisor, wanted in copies)
