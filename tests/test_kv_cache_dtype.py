"""The KV cache in 8 bits: how much smaller it is, and what becomes of a model's answers."""

import json
import os
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from hex_llm import LLM, SamplingParams, build
from hex_llm.config import Config
from hex_llm.parallel.mesh import make_mesh
from hex_llm.runner.memory import Memory
from tests.test_default_model import HELD_OUT

GIB = 2**30


def test_a_block_is_half_as_large_so_there_are_twice_as_many():
    def blocks(**flags) -> tuple[int, int]:
        config = Config(max_model_len=512, dtype="bfloat16", warmup=False, enable_prefix_cache_hbm=True, **flags)
        model, mesh = build.find_model(config), make_mesh()
        buckets = build.make_buckets(config, model, mesh)
        plan = build.plan_memory(config, model, mesh, buckets, Memory(4 * GIB, 0, GIB))
        return plan.needs.block, plan.compiler.programs.shapes.num_pages

    (wide, few), (narrow, many) = blocks(), blocks(kv_cache_dtype="fp8")
    assert (2 * narrow, 2 * few) == (wide, many)
    assert blocks(kv_cache_dtype="fp8_e4m3") == (narrow, many)
    scaled, _ = blocks(kv_cache_dtype="int8")
    assert scaled == narrow * (64 + 4) // 64  # heads of 64 numbers, and their scale


@cache
def right_answers(kv_cache_dtype: str) -> int:
    """Of 200 held-out questions."""
    llm = LLM(
        max_model_len=512,
        max_decode_seqs=64,
        decode_seqs_padding=64,
        prefill_len_padding=512,
        max_num_batched_tokens=512,
        max_prefill_seqs=16,
        warmup=False,
        compilation_cache_dir=os.environ.get("JAX_COMPILATION_CACHE_DIR", ""),
        kv_cache_dtype=kv_cache_dtype,
    )
    questions = [each for line in HELD_OUT.read_text("utf-8").splitlines() if "answer" in (each := json.loads(line))]
    asked = questions[:: len(questions) // 200][:200]
    sampling = SamplingParams(temperature=0, max_tokens=200)
    told = llm.chat([question["messages"] for question in asked], sampling, progress=False)
    return sum(result.outputs[0].text == question["answer"] for result, question in zip(told, asked, strict=True))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_the_embedded_model_keeps_its_accuracy_within_2_points(kv_cache_dtype):
    assert right_answers(kv_cache_dtype) >= right_answers("auto") - 4
    assert right_answers("auto") >= 180


@pytest.mark.parametrize(("name", "dtypes"), [("fp8", {jnp.float8_e4m3fn}), ("int8", {jnp.int8, jnp.float32})])
def test_keys_and_values_are_kept_in_the_type_that_was_asked_for(name, dtypes):
    config = Config(max_model_len=64, num_blocks=8, warmup=False, compilation_cache_dir="", kv_cache_dtype=name)
    runner, _ = build.build_runner(config, build.find_model(config))
    assert {leaf.dtype for leaf in jax.tree.leaves(runner._kv)} == {jnp.dtype(each) for each in dtypes}
