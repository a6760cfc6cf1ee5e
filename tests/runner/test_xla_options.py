"""What XLA is told, as a GPU would have it told; no test needs one."""

import os

import jax
import pytest
from jaxlib import xla_client

from hex_llm.runner.buckets import Bucket
from hex_llm.runner.programs import Admit, Forward, Program, ScorePrompt
from hex_llm.runner.xla_options import GPU_MEMORY, compiler_options, prepare_environment

PROGRAMS: list[Program] = [Forward(Bucket(8, 8, True)), Forward(Bucket(512, 8, False)), ScorePrompt(512), Admit()]


def memory_share(monkeypatch: pytest.MonkeyPatch, **given: str) -> float | None:
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
@pytest.mark.parametrize("program", PROGRAMS)
def test_only_a_gpus_compiler_gets_options(monkeypatch, backend, program):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert compiler_options(program) is None


@pytest.mark.parametrize("program", PROGRAMS)
def test_on_a_gpu_a_profile_shows_every_program_as_it_runs_without_one(monkeypatch, program):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert (compiler_options(program) or {})["xla_enable_command_buffers_during_profiling"] is True


@pytest.mark.parametrize("tokens", [1, 8, 15, 16, 64, 8192])
def test_on_a_gpu_triton_multiplies_a_few_rows_and_cublas_more(monkeypatch, tokens):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for decode in (True, False):
        options = compiler_options(Forward(Bucket(tokens, tokens, decode))) or {}
        assert options["xla_gpu_enable_triton_gemm"] is (tokens < 16)


@pytest.mark.parametrize("program", [ScorePrompt(8), Admit()])
def test_on_a_gpu_what_is_no_step_of_the_model_has_the_matmuls_that_xla_chooses(monkeypatch, program):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "xla_gpu_enable_triton_gemm" not in (compiler_options(program) or {})
