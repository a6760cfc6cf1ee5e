"""What XLA is told, as a GPU would have it told; no test needs one."""

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxlib import xla_client

from hex_llm.kernels.chain import MAX_TOKENS
from hex_llm.kernels.quant_matmul.weight import Coding, Layout, Packed, bits
from hex_llm.parallel.mesh import make_mesh
from hex_llm.runner import xla_options
from hex_llm.runner.buckets import Buckets
from hex_llm.runner.programs import Forward, Program, Programs, all_programs
from hex_llm.runner.xla_options import GPU_MEMORY, prepare_environment

PROGRAMS = list(
    all_programs(Buckets(decode_padding=1, max_decodes=64, mixed_padding=8, max_mixed_tokens=4096, max_mixed_seqs=8))
)
ARCH = {"embed_size": 4096, "mlp_size": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
LONG = jax.ShapeDtypeStruct((1 << 14, 1 << 14), jnp.bfloat16)  # a layer's weights that take the device a while
STEPS = [program for program in PROGRAMS if isinstance(program, Forward)]
OTHERS = [program for program in PROGRAMS if not isinstance(program, Forward)]


def compiler_options(program: Program, dtype=jnp.bfloat16, weights: Sequence[Any] = (LONG,), **changes: int) -> dict:
    params = SimpleNamespace(embed=jax.ShapeDtypeStruct((8, 8), dtype), layers=weights)
    biases = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
    arch: Any = SimpleNamespace(**ARCH | {"num_layers": 1, "num_experts": 0} | biases | changes)
    shapes: Any = SimpleNamespace(num_pages=10, page_size=32)
    programs = Programs(arch, shapes, params, dtype, make_mesh())
    return xla_options.compiler_options(programs, program) or {}


def memory_share(monkeypatch: pytest.MonkeyPatch, **given: str) -> object:
    """What JAX would take of a GPU, with `given` in the environment that we prepare for it."""
    monkeypatch.setattr(os, "environ", dict(given))
    prepare_environment()
    assert os.environ.items() >= given.items()
    return xla_client.generate_pjrt_gpu_plugin_options().get("memory_fraction")


def test_jax_takes_the_share_of_a_gpus_memory_that_we_say(monkeypatch):
    assert memory_share(monkeypatch) == float(GPU_MEMORY)


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_share_of_memory_that_the_user_has_set_stays_under_either_name(monkeypatch, name):
    assert memory_share(monkeypatch, **{name: "0.5"}) == 0.5


def test_preparing_the_environment_twice_changes_nothing_more(monkeypatch):
    memory_share(monkeypatch)
    prepared = dict(os.environ)
    assert memory_share(monkeypatch, **prepared) == float(GPU_MEMORY)
    assert os.environ == prepared


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_only_a_gpus_compiler_gets_options(monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert all(compiler_options(program) == {} for program in PROGRAMS)


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_a_profile_shows_every_program_as_it_runs_without_one():
    for program in PROGRAMS:
        assert compiler_options(program)["xla_enable_command_buffers_during_profiling"] is True


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_triton_multiplies_a_few_rows_and_cublas_more():
    sizes = {True: set[int](), False: set[int]()}
    for program in STEPS:
        sizes[compiler_options(program)["xla_gpu_enable_triton_gemm"]].add(program.bucket.tokens)
    assert sizes[True] == {1, 2, 4, 8}
    assert sizes[False] == {2**power for power in range(4, 13)}


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_what_is_no_step_of_the_model_has_the_matmuls_that_xla_chooses():
    assert OTHERS
    for program in OTHERS:
        assert "xla_gpu_enable_triton_gemm" not in compiler_options(program)


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_only_a_chain_of_our_kernels_goes_without_graphs():
    without = [p for p in PROGRAMS if compiler_options(p).get("xla_gpu_enable_command_buffer") == ""]
    assert without == [step for step in STEPS if step.bucket.tokens <= MAX_TOKENS]
    assert 0 < len(without) < len(STEPS)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": True, "embed_size": 3584, "mlp_size": 18944, "num_heads": 28, "num_kv_heads": 4},
        {"embed_size": 3584, "num_heads": 16, "head_dim": 256},
        {"embed_size": 2304, "mlp_size": 9216, "num_heads": 8, "num_kv_heads": 4, "head_dim": 256},
        {"embed_size": 1152, "mlp_size": 6912, "num_heads": 4, "num_kv_heads": 1, "head_dim": 256},
        {"embed_size": 3072, "mlp_size": 8192, "num_heads": 32, "num_kv_heads": 32, "head_dim": 96},
    ],
    ids=["Qwen2.5-7B", "Gemma-2-9B", "Gemma-2-2B", "Gemma-3-1B", "Phi-3-mini"],
)
def test_on_a_gpu_other_families_are_chains_too(changes):
    without = [step for step in STEPS if compiler_options(step, **changes).get("xla_gpu_enable_command_buffer") == ""]
    assert without == [step for step in STEPS if step.bucket.tokens <= MAX_TOKENS]


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_a_model_that_our_kernels_do_not_multiply_keeps_its_graphs():
    others = (
        {"dtype": jnp.float32},
        {"mlp_size": 96},
        {"embed_size": 4160},
        {"head_dim": 192},
        {"o_bias": True},
        {"mlp_bias": True},
    )
    for changes in others:
        assert not any("xla_gpu_enable_command_buffer" in compiler_options(step, **changes) for step in STEPS)


def in_few_bits(coding: Coding, layout: Layout, columns: int) -> Packed:
    """What looks like a weight of 256 rows."""
    plain = 256, columns if bits(coding) == 8 else columns // 2
    shape = (4, columns // 128, 8, 128) if layout.startswith("hopper") else plain
    array: Any = jax.ShapeDtypeStruct(shape, jnp.int8)
    return Packed(array, array, zero=None, order=None, input_scale=None, coding=coding, layout=layout)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("weight", "is_chain"),
    [
        (in_few_bits("int4", "hopper", 4096), True),
        (in_few_bits("int8", "hopper", 128), True),
        (in_few_bits("fp8", "plain", 4096), True),  # multiplied as it is
        (in_few_bits("fp8", "plain", 4096 + 64), False),
        (in_few_bits("w8a8", "plain", 4096), True),
        (in_few_bits("w8a8", "plain", 4096 + 64), False),
        (in_few_bits("w4a8", "hopper8", 4096), True),
        (in_few_bits("w4a8", "plain", 4096), False),
        (in_few_bits("int4", "plain", 4096), False),
        (in_few_bits("int8", "plain", 4096), False),
    ],
    ids=lambda value: f"{value.coding}-{value.layout}-{value.shape[1]}" if isinstance(value, Packed) else None,
)
def test_on_a_gpu_a_model_in_few_bits_is_a_chain_if_kernels_take_all_of_its_weights(weight, is_chain):
    dense, taken = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16), in_few_bits("int4", "hopper", 4096)
    few = [step for step in STEPS if step.bucket.tokens <= MAX_TOKENS]
    without = [
        step
        for step in STEPS
        if compiler_options(step, weights=(LONG, dense, taken, weight)).get("xla_gpu_enable_command_buffer") == ""
    ]
    assert without == (few if is_chain else [])


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("weight", "fewest"),
    [(LONG, 1), ("bf16", 32), ("int4", 32), ("w4a8", 32), ("fp8", MAX_TOKENS + 1), ("w8a8", MAX_TOKENS + 1)],
)
def test_on_a_gpu_layers_that_are_over_before_the_host_has_launched_them_are_graphs(weight, fewest):
    if weight == "bf16":
        weight = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    elif isinstance(weight, str):
        layouts: dict[str, Layout] = {"int4": "hopper", "w4a8": "hopper8"}
        weight = in_few_bits(weight, layouts.get(weight, "plain"), 4096)
    few = [step for step in STEPS if step.bucket.tokens <= MAX_TOKENS]
    without = [step for step in few if "xla_gpu_enable_command_buffer" in compiler_options(step, weights=(weight,))]
    assert without == [step for step in few if step.bucket.tokens >= fewest]
