"""Attention's kernels for Hopper, brought to what a GPU's compiler gets: the simulator does what Mosaic may refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from hex_llm.kernels.paged_attention.gpu_decode import decode, plan_decode, tuning_for
from hex_llm.kernels.paged_attention.gpu_decode_sizes import HEAD_DIMS
from hex_llm.kernels.paged_attention.gpu_prefill import prefill
from hex_llm.kernels.paged_attention.gpu_prefill_plan import plan_prefill
from hex_llm.kernels.paged_attention.pages import rounded
from hex_llm.kernels.rope_write.gpu import rope_write

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
