"""What kernels read before the one in front of them has ended: nothing that this may write."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hex_llm.kernels.lora_matmul.gpu_own import keep_own
from hex_llm.kernels.matmul import add_norm_gpu
from hex_llm.kernels.matmul import gpu as matmul_gpu
from hex_llm.kernels.matmul.gpu import More, Plan
from hex_llm.kernels.paged_attention.gpu_decode import DEFAULT, decode, plan_decode
from hex_llm.kernels.paged_attention.gpu_decode_merge import merge
from hex_llm.kernels.paged_attention.gpu_decode_sizes import sizes_of
from hex_llm.kernels.quant_matmul import gpu_eight_bits, gpu_rows
from hex_llm.kernels.quant_matmul.rows import TYPES, EightBits, Rows
from hex_llm.kernels.quant_matmul.weight import Coding, Packed
from hex_llm.kernels.rms import Rms
from hex_llm.kernels.rope_write import gpu as rope_write_gpu
from hex_llm.kernels.window import Window
from tests.kernels.contexts import random_pages

OLD, FRESH = 3.0, 72.0  # what was there before, and what the kernel in front writes: both are numbers in 8 bits, too
BF16 = jnp.bfloat16


def full(value, *shape, dtype=BF16):
    return jnp.full(shape, value, dtype)


def product():
    matmul_gpu.matmul(full(FRESH, 8, 256), full(OLD, 128, 256), plan=Plan(rows=64, depth=64, slots=2, blocks=2))


def product_with_more_columns():
    more = More(full(FRESH, 8, 256), (full(OLD, 64, 128),) * 2)
    plan = Plan(rows=64, depth=64, slots=2, blocks=2)
    matmul_gpu.parts(full(FRESH, 8, 128), full(OLD, 128, 128), plan=plan, more=more)


def own_of_adapters():
    keep_own(full(FRESH, 2, 8, 2, 4, 16, dtype=jnp.float32), full(OLD, 8, dtype=jnp.int32), jnp.dtype(BF16))


def add_norm():
    pieces = full(FRESH, 2, 3, 512, dtype=jnp.float32)
    add_norm_gpu.add_norm(full(FRESH, 3, 512), pieces, full(OLD, 512), Rms(1e-5), inner=full(OLD, 512))


def eight_bits_product(coding: Coding):
    rows = Rows(full(FRESH, 8, 256, dtype=TYPES[coding]), full(FRESH, 8, dtype=jnp.float32), "bfloat16")
    old = {"data": full(OLD, 128, 256, dtype=TYPES[coding]), "scale": full(OLD, 128, 1, dtype=jnp.float32)}
    weight = Packed(**old, zero=None, order=None, input_scale=None, coding=coding, layout="plain")
    gpu_eight_bits.parts(rows, weight, plan=Plan(rows=64, depth=128, slots=2, blocks=2))


def eight_bits_rows():
    gpu_rows.quantize(full(FRESH, 3, 256), EightBits(jnp.float32(OLD), "float8_e4m3fn"))


def eight_bits_norm():
    pieces = full(FRESH, 2, 3, 512, dtype=jnp.float32)
    how = EightBits(jnp.float32(OLD), "float8_e4m3fn")
    add_norm_gpu.add_norm(full(FRESH, 3, 512), pieces, full(OLD, 512), Rms(1e-5), eight_bits=how)


def rope_write():
    tables = (full(OLD, 2, 1, 32, dtype=jnp.float32),) * 2
    pages, places = full(FRESH, 3, 2, 1, 8, 64), jnp.asarray([1, 2], jnp.int32)
    options: Any = {"bias": full(OLD, 6 * 64), "norms": (full(OLD, 64),) * 2, "rms": Rms(1e-5)}
    parts = full(FRESH, 1, 2, 6 * 64)
    rope_write_gpu.rope_write(parts, tables, pages, places, places, jnp.dtype(BF16), **options)


def attention(window=None):
    lengths, page_size = [300, 64, 1, 0, 65], 32
    pages, table = random_pages(
        np.random.default_rng(0), lengths, kv_heads=2, head_dim=64, page_size=page_size, dtype=ml_dtypes.bfloat16
    )
    pages = np.full_like(pages, OLD)
    for sequence, length in enumerate(lengths):
        if length:
            page, offset = divmod(length - 1, page_size)
            pages[table[sequence, page], :, :, offset] = FRESH
    plan = plan_decode(jnp.asarray(lengths, jnp.int32), num_kv_heads=2, window=window, num_cores=4)
    q = full(FRESH, len(lengths), 4, 64)
    decode(q, jnp.asarray(pages), jnp.asarray(table), plan, scale=1.0, window=window)


def merging():
    q, pages = full(FRESH, 2, 4, 128), full(FRESH, 9, 2, 2, 32, 128)
    sizes = sizes_of(q, pages, DEFAULT)
    plan = plan_decode(jnp.asarray([100, 0], jnp.int32), num_kv_heads=2, num_cores=4)
    averages = full(FRESH, sizes.rows, sizes.max_chunks, sizes.group, 128, dtype=jnp.float32)
    exponents = full(FRESH, sizes.rows, sizes.max_chunks, 64, dtype=jnp.float32)
    merge(averages, exponents, plan, sizes, 2, full(OLD, 4))


@pytest.mark.parametrize(
    "run",
    [
        product,
        product_with_more_columns,
        own_of_adapters,
        add_norm,
        lambda: eight_bits_product("fp8"),
        lambda: eight_bits_product("w8a8"),
        eight_bits_rows,
        eight_bits_norm,
        rope_write,
        attention,
        lambda: attention(window=Window(75)),
        merging,
    ],
    ids=[
        "product",
        "product with more columns",
        "own of adapters",
        "add_norm",
        "fp8 product",
        "w8a8 product",
        "rows in 8 bits",
        "norm in 8 bits",
        "rope_write",
        "attention",
        "window",
        "merge",
    ],
)
def test_nothing_that_the_kernel_in_front_writes_is_read_before_it_has_ended(simulator, run):
    run()
    assert simulator, "it reads something early"
    for values in simulator:
        assert not (np.asarray(values, np.float32) == FRESH).any()


def test_attention_reads_what_came_before_the_last_tokens_early(simulator):
    attention()
    assert any((np.asarray(values, np.float32) == OLD).sum() == 32 * 64 for values in simulator)
