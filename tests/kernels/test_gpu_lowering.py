"""Kernels for Hopper, brought to what a GPU's compiler gets: the simulator does what Mosaic may refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from hex_llm.kernels.lora_matmul import gpu as lora_gpu
from hex_llm.kernels.lora_matmul.gpu_own import does_rank, keep_own
from hex_llm.kernels.lora_matmul.weight import Adapted, Own, Pairs
from hex_llm.kernels.matmul.add_norm_gpu import add_norm
from hex_llm.kernels.paged_attention.gpu_decode import decode, plan_decode, tuning_for
from hex_llm.kernels.paged_attention.gpu_decode_sizes import HEAD_DIMS
from hex_llm.kernels.paged_attention.gpu_prefill import prefill
from hex_llm.kernels.paged_attention.gpu_prefill_plan import plan_prefill
from hex_llm.kernels.paged_attention.pages import rounded
from hex_llm.kernels.quant_matmul import gpu, gpu_eight_bits, gpu_layout, plain
from hex_llm.kernels.quant_matmul.gpu_plan import Plan
from hex_llm.kernels.quant_matmul.rows import EightBits
from hex_llm.kernels.quant_matmul.weight import Codes
from hex_llm.kernels.rms import Rms
from hex_llm.kernels.rope_write.gpu import rope_write
from hex_llm.parallel.backend import compiling_for

HOPPER = AbstractMesh(
    (1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
)
BF16, FP8, INT8 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8
SEQS, HEADS, KV_HEADS = 4, 8, 2


def lowered(function: Any, *arguments: Any) -> str:
    with jax.sharding.use_abstract_mesh(HOPPER):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def array(*shape: int, dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def pages_of(head_dim: int, dtype: Any, page_size: int) -> Any:
    return jax.eval_shape(lambda: rounded(jnp.zeros((9, 2, KV_HEADS, page_size, head_dim)), dtype))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("dtype", "page_size"), [(BF16, 32), (FP8, 8), (INT8, 8)])
def test_decode_is_lowered(head_dim, dtype, page_size):
    tuning = tuning_for(head_dim, dtype)

    def attend(q, pages, table, kv_len):
        return decode(q, pages, table, plan_decode(kv_len, num_kv_heads=KV_HEADS, tuning=tuning), scale=0.1)

    pages = pages_of(head_dim, dtype, page_size)
    text = lowered(attend, array(SEQS, HEADS, head_dim, dtype=BF16), pages, array(SEQS, 64), array(SEQS))
    assert text.count("mosaic_gpu") >= 2  # the chunks, and their merging


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, BF16), (64, INT8), (96, FP8), (96, INT8), (128, FP8), (128, INT8), (256, BF16), (256, INT8)],
)
def test_prefill_is_lowered(head_dim, dtype):
    tokens = 512

    def attend(q, pages, table, cu_q, kv_len):
        sizes: dict = {"num_tokens": tokens, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": head_dim}
        return prefill(q, pages, table, plan_prefill(cu_q, kv_len, 0, SEQS, **sizes), scale=0.1)

    arguments = array(tokens, HEADS, head_dim, dtype=BF16), pages_of(head_dim, dtype, 16), array(SEQS, 64)
    assert "mosaic_gpu" in lowered(attend, *arguments, array(SEQS + 1), array(SEQS))


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 2), (96, 1), (128, 2)])
def test_writing_whole_numbers_and_their_scales_is_lowered(head_dim, kv_heads):
    pages = jax.eval_shape(lambda: rounded(jnp.zeros((9, 2, kv_heads, 8, head_dim)), INT8))

    def write(parts, pages, write_page, write_offset):
        return rope_write(parts, None, pages, write_page, write_offset, jnp.dtype(BF16))

    parts = array(1, SEQS, (HEADS + 2 * kv_heads) * head_dim, dtype=BF16)
    assert "mosaic_gpu" in lowered(write, parts, pages, array(SEQS), array(SEQS))


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, FP8), (128, FP8), (128, INT8), (256, FP8)])
def test_writing_queries_in_the_order_of_keys_is_lowered(head_dim, dtype):
    def write(parts, pages, norms, write_page, write_offset):
        options: Any = {"norms": (norms, norms), "rms": Rms(1e-5), "decode": True}
        return rope_write(parts, None, pages, write_page, write_offset, jnp.dtype(BF16), **options)[0].values

    parts = array(1, SEQS, (HEADS + 2 * KV_HEADS) * head_dim, dtype=BF16)
    norms = array(head_dim, dtype=BF16)
    text = lowered(write, parts, pages_of(head_dim, dtype, 8), norms, array(SEQS), array(SEQS))
    assert "mosaic_gpu" in text
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize("tokens", [1, 40, 128])
@pytest.mark.parametrize("how", [EightBits(None, "int8"), EightBits(None, "float8_e4m3fn")])
def test_a_norm_in_8_bits_and_the_product_behind_it_are_lowered(tokens, how):
    coding = "w8a8" if how.dtype == INT8 else "fp8"
    codes = Codes(array(512, 256, dtype=how.dtype), array(512, 1, dtype=jnp.float32), None, None, None, coding)

    def layer(x, pieces, norm, codes):
        _, rows = add_norm(x, pieces, norm, Rms(1e-5), eight_bits=how)
        hidden = gpu_eight_bits.parts(rows, plain.pack(codes), activation="silu")[0]
        return gpu_eight_bits.parts(hidden, plain.pack(codes))

    with compiling_for("gpu"):
        x, norm = array(tokens, 256, dtype=BF16), array(256, dtype=BF16)
        text = lowered(layer, x, array(2, tokens, 256, dtype=jnp.float32), norm, codes)
    assert text.count("mosaic_gpu") >= 4  # the norm, a product, its result in 8 bits, and a product


@pytest.mark.parametrize(
    ("plan", "activation"),
    [
        (Plan(workers=2, stack=2), "silu"),
        (Plan(workers=2, stack=2, even=True), "silu"),
        (Plan(workers=2, stack=1, splits=4), None),
        (Plan(workers=1, stack=1, depth=64), None),
    ],
)
def test_products_with_codes_are_lowered_however_they_are_cut(plan, activation):
    scales = array(1024, 8, dtype=jnp.float32)
    codes = Codes(array(1024, 1024, dtype=jnp.uint8), scales, scales, None, None, "int4")
    weight = jax.eval_shape(gpu_layout.pack, codes)
    text = lowered(
        lambda x, weight: gpu.parts(x, weight, plan=plan, activation=activation), array(64, 1024, dtype=BF16), weight
    )
    assert "mosaic_gpu" in text


TOKENS, ROOMS = (1, 40, 128), ((16, 16), (4, 16), (3, 64))
PRODUCTS = (
    ((4096, 1024, 1024), 4096, None),
    ((4096,), 8192, None),
    ((8192, 8192), 4096, "silu"),
    ((16384,), 4096, "gelu"),
)
# Every product with all numbers of tokens and with all rooms; the other pairs of these two are slow.
WITH_ADAPTERS = [
    pytest.param(tokens, *room, *product, marks=[] if (i + j + k) % 3 == 0 else pytest.mark.slow)
    for i, product in enumerate(PRODUCTS)
    for j, room in enumerate(ROOMS)
    for k, tokens in enumerate(TOKENS)
]


@pytest.mark.parametrize(("tokens", "slots", "rank", "rows", "size", "activation"), WITH_ADAPTERS)
def test_products_with_adapters_are_lowered(tokens, slots, rank, rows, size, activation):
    pairs = Pairs(
        array(len(rows), slots, rank, size, dtype=BF16), tuple(array(each, slots, rank, dtype=BF16) for each in rows)
    )
    own = Own(array(tokens), array(tokens, slots, dtype=INT8))
    weight = Adapted(array(sum(rows), size, dtype=BF16), pairs, own)
    x = array(tokens, size, dtype=BF16)
    assert lora_gpu.supports(x, weight, activation=activation)
    text = lowered(lambda x, weight: lora_gpu.parts(x, weight, activation=activation), x, weight)
    assert text.count("@mosaic_gpu_v2") == 3  # with the first of pairs, what is a token's own, and with the weight


@pytest.mark.parametrize(("slots", "rank"), [(32, 2), (2, 96), (16, 12), (1, 512)])
def test_keeping_what_is_a_token_s_own_is_lowered(slots, rank):
    def keep(sums, slot):
        return keep_own(sums, slot, jnp.dtype(BF16))

    assert does_rank(rank)
    assert "mosaic_gpu" in lowered(keep, array(3, 8, 2, slots, rank, dtype=jnp.float32), array(5))
