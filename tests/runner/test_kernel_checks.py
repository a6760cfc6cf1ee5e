"""What a TPU's memories cannot hold is refused at the start, before anything is loaded; what no kernel does is told."""

import json
import logging

import pytest

from hex_llm import build
from hex_llm.config import Config
from hex_llm.errors import ConfigError
from hex_llm.parallel.backend import compiling_for
from hex_llm.parallel.mesh import make_mesh
from hex_llm.runner.memory import GIB, Memory
from tests.checkpoints import llama_config, write_llama
from tests.quantization.writers import KINDS


def plan(on="tpu", **flags):
    """Of a device with much memory, up to where it would be compiled for."""
    with compiling_for(on):
        config = Config(load_format="dummy", enable_jit=False, compilation_cache_dir="", **flags)
        model, mesh = build.find_model(config), make_mesh(1)
        buckets = build.make_buckets(config, model, mesh)
        return build.plan_memory(config, model, mesh, buckets, Memory(10_000 * GIB, 0))


def test_a_page_table_that_scalar_memory_does_not_hold_is_refused_by_its_flags():
    said = (
        r"--max_model_len=10485760 is 327680 blocks of --block_size=32 tokens, but a TPU's scalar memory holds the "
        r"numbers of 65536: --max_model_len=2097152 would fit, and so might larger blocks\."
    )
    with pytest.raises(ConfigError, match=said):
        plan(model="meta-llama/Llama-4-Scout-17B-16E-Instruct")
    plan(model="meta-llama/Llama-4-Scout-17B-16E-Instruct", max_model_len=2097152)
    plan(model="meta-llama/Llama-4-Scout-17B-16E-Instruct", block_size=2048, prefill_len_padding=2048)


def test_a_step_of_more_tokens_than_scalar_memory_has_places_for_is_refused_by_its_flag():
    flags = {"model": "meta-llama/Llama-3.1-8B", "max_model_len": 8192}
    with pytest.raises(ConfigError, match=r"--max_num_batched_tokens makes steps of 131072 tokens, .* of 65536\."):
        plan(max_num_batched_tokens=131072, **flags)
    plan(max_num_batched_tokens=65536, **flags)


def test_more_heads_than_vector_memory_holds_blocks_of_are_refused_by_the_flag_that_helps():
    with pytest.raises(ConfigError, match=r"--tensor_parallel_size=1 leaves each device 40 heads .* more devices"):
        plan(model="meta-llama/Llama-2-13b-hf", dtype="float32", max_model_len=4096)
    plan(model="meta-llama/Llama-2-13b-hf", dtype="bfloat16", max_model_len=4096)


def test_heads_that_the_kernel_does_not_do_are_told_of(tmp_path, caplog):
    folder = write_llama(tmp_path, num_attention_heads=17, num_key_value_heads=1, head_dim=32)
    with caplog.at_level(logging.WARNING, "hex_llm"):
        plan(model=str(folder))
    assert "Attention will be slow" in caplog.text
    assert "groups of 17 query heads" in caplog.text


@pytest.mark.parametrize(("dtype", "is_slow"), [("fp8", True), ("int8", False), ("auto", False)])
def test_a_cache_that_is_slow_on_cpus_is_told_of(dtype, is_slow, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hex_llm"):
        plan("cpu", model=str(write_llama(tmp_path)), kv_cache_dtype=dtype, num_blocks=64)
    assert ("--kv_cache_dtype=fp8 is slow on CPUs" in caplog.text) == is_slow


@pytest.mark.parametrize("block_size", [8, 32])
def test_kernels_for_hopper_take_pages_of_every_type_and_those_for_tpus_all_but_int8(block_size, caplog):
    def told(on: str, kv_cache_dtype: str) -> bool:
        caplog.clear()
        flags = {"dtype": "bfloat16", "max_model_len": 512, "block_size": block_size}
        with caplog.at_level(logging.WARNING, "hex_llm"):
            plan(on, model="meta-llama/Llama-3.1-8B", kv_cache_dtype=kv_cache_dtype, **flags)
        return "Attention will be slow" in caplog.text

    assert [told("gpu", each) for each in ("auto", "fp8", "int8")] == [False, False, False]
    assert [told("tpu", each) for each in ("auto", "fp8", "int8")] == [False, False, True]


def test_pages_for_tpus_have_whole_tiles_and_are_planned_so(tmp_path):
    def block(head_dim: int) -> int:
        return plan(model=str(write_llama(tmp_path / str(head_dim), head_dim=head_dim))).needs.block

    assert block(64) == block(96) == block(128) == block(160) // 2


def test_other_devices_have_no_such_limits():
    config = Config(model="meta-llama/Llama-4-Scout-17B-16E-Instruct", load_format="dummy", enable_jit=False)
    model, mesh = build.find_model(config), make_mesh(1)
    build.plan_memory(config, model, mesh, build.make_buckets(config, model, mesh), Memory(10_000 * GIB, 0))


def told_of_products(caplog, on, **flags) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hex_llm"):
        plan(on, dtype="bfloat16", max_model_len=512, **flags)
    return next((line for line in caplog.messages if "Products with weights in few bits will be slow" in line), "")


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_in_few_bits_that_no_kernel_takes_are_told_of_by_name_and_shape(quantization, tmp_path, caplog):
    sizes = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 6, "num_key_value_heads": 2}
    folder = str(write_llama(tmp_path, **sizes))
    said = told_of_products(caplog, "tpu", model=folder, quantization=quantization)
    assert ".layers[0].mlp.gate_up [448, 96]" in said
    assert ".layers[0].mlp.down [96, 224]" in said
    assert ".layers[1]" not in said  # a shape is told of once
    # Float8 lies in rows and columns on Hopper, too, but is multiplied as it is.
    assert bool(told_of_products(caplog, "gpu", model=folder, quantization=quantization)) == (quantization != "fp8")
    assert not told_of_products(caplog, "cpu", model=folder, quantization=quantization)
    assert not told_of_products(caplog, "tpu", model=folder)


@pytest.mark.parametrize("on", ["tpu", "gpu"])
def test_nothing_is_told_of_whole_numbers_that_every_device_multiplies_as_they_lie(on, tmp_path, caplog):
    sizes = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = llama_config(**sizes) | {"quantization_config": KINDS["int-quantized"].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not told_of_products(caplog, on, model=str(tmp_path))


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8", "w8a8", "w4a8"])
def test_nothing_is_told_of_weights_that_kernels_take(quantization, tmp_path, caplog):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = str(write_llama(tmp_path, **sizes))
    for on in ("tpu", "gpu"):
        assert not told_of_products(caplog, on, model=folder, quantization=quantization)


@pytest.mark.parametrize(("mlp", "slow"), [(96, True), (128, False)])
def test_experts_in_float8_that_no_kernel_takes_are_told_of_on_hopper(mlp, slow, tmp_path, caplog):
    config = llama_config(
        architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4, intermediate_size=mlp
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = told_of_products(caplog, "gpu", model=str(tmp_path), quantization="fp8")
    assert ("mlp.down [4, 64, 96]" in said) == slow
    assert ("attention.qkv" in said) is False
