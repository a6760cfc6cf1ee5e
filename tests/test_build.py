import subprocess
import sys

import jax
import pytest

from hex_llm import build
from hex_llm.config import Config
from hex_llm.engine.limits import Limits
from hex_llm.errors import OutOfMemory
from hex_llm.parallel.mesh import make_mesh
from hex_llm.runner.buckets import SEPARATE, TOGETHER, Buckets
from hex_llm.runner.compiler import Compiler, DoesNotFit
from hex_llm.runner.memory import Memory
from tests.checkpoints import write_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=131072)


@pytest.fixture
def chosen(folder, monkeypatch):
    """Makes the limits and buckets that the flags get on a backend, whatever this machine has."""

    def choose(backend: str, **flags) -> tuple[Limits, Buckets]:
        config = Config(model=str(folder), **flags)
        model, mesh = build.find_model(config), make_mesh()
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: backend)
            return build._limits(config, model, 100_000), build.make_buckets(config, model, mesh)

    return choose


def decode_sizes(buckets: Buckets) -> list[int]:
    return [bucket.tokens for bucket in buckets if bucket.decode]


def test_the_engine_needs_no_transformers_and_no_tokenizer():
    code = (
        "import sys\n"
        "from hex_llm.build import build_engine, find_model\n"
        "from hex_llm.config import Config\n"
        "config = Config(warmup=False, num_blocks=64, compilation_cache_dir='')\n"
        "build_engine(config, find_model(config))\n"
        "found = {'transformers', 'tokenizers', 'torch', 'scipy'} & sys.modules.keys()\n"
        "sys.exit(' '.join(found) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("backend", "flags", "step_tokens", "mixed_tokens"),
    [
        ("gpu", {"enable_chunked_prefill": True}, 8192, 512),
        ("gpu", {"enable_chunked_prefill": True, "max_decode_seqs": 64}, 8192, 512),
        ("gpu", {"enable_chunked_prefill": True, "max_decode_seqs": 1000}, 8192, 2000),
        ("gpu", {"enable_chunked_prefill": True, "max_decode_seqs": 5000}, 8192, 8192),
        ("gpu", {"enable_chunked_prefill": True, "max_decode_seqs": 9000}, 9000, 9000),
        ("gpu", {}, 8192, None),
        ("cpu", {"enable_chunked_prefill": True}, 2048, None),
        ("tpu", {"enable_chunked_prefill": True}, 2048, None),
        ("cpu", {}, 8192, None),
    ],
)
def test_a_step_holds_what_suits_the_device(chosen, backend, flags, step_tokens, mixed_tokens):
    limits, _ = chosen(backend, **flags)
    assert (limits.step_tokens, limits.mixed_tokens) == (step_tokens, mixed_tokens)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("tokens", [300, 3000, 20_000])
def test_the_tokens_of_a_step_that_are_given_hold_in_every_step(chosen, backend, chunked, tokens):
    limits, _ = chosen(backend, enable_chunked_prefill=chunked, max_num_batched_tokens=tokens)
    assert (limits.step_tokens, limits.mixed_tokens) == (tokens, None)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("max_prefill_seqs", [1, 16])
@pytest.mark.parametrize("max_decode_seqs", [1, 7, 256, 600])
@pytest.mark.parametrize("max_model_len", [2, 100, 131072])
def test_no_step_of_any_size_lacks_a_bucket(chosen, backend, max_prefill_seqs, max_decode_seqs, max_model_len):
    limits, buckets = chosen(
        backend,
        enable_chunked_prefill=True,
        max_prefill_seqs=max_prefill_seqs,
        max_decode_seqs=max_decode_seqs,
        max_model_len=max_model_len,
    )
    for tokens in (1, limits.mixed_tokens or 1, limits.step_tokens):
        assert buckets.choose(tokens, decode=False).seqs >= min(tokens, max_decode_seqs)
    for seqs in range(1, max_decode_seqs + 1):
        assert buckets.choose(seqs, decode=True).seqs >= seqs


@pytest.mark.parametrize(
    ("backend", "padding", "sizes"),
    [
        ("gpu", 8, [1, 8, 16, 32]),
        ("gpu", 4, [1, 4, 8, 16, 32]),
        ("gpu", 1, [1, 2, 4, 8, 16, 32]),
        ("gpu", 9, [9, 18, 36]),
        ("gpu", 16, [16, 32]),
        ("tpu", 8, [8, 16, 32]),
        ("cpu", 8, [8, 32]),
    ],
)
def test_on_a_gpu_a_sequence_alone_has_a_step_unless_the_padding_is_more_than_the_default(
    chosen, backend, padding, sizes
):
    _, buckets = chosen(backend, max_decode_seqs=32, decode_seqs_padding=padding)
    assert decode_sizes(buckets) == sizes


@pytest.mark.parametrize(("backend", "variants"), [("cpu", TOGETHER), ("gpu", SEPARATE), ("tpu", SEPARATE)])
def test_only_a_cpu_looks_at_run_time_for_what_choosing_a_token_takes(chosen, backend, variants):
    _, buckets = chosen(backend)
    assert buckets.variants == variants


@pytest.fixture
def planned(folder, monkeypatch):
    """Plans for a device whose compiler refuses steps with more than `most` blocks beside them; gives the blocks that
    were tried, and those that there are to be."""

    def plan(most: int) -> tuple[list[int], int]:
        tried = []

        def memory(compiler: Compiler, program: object) -> tuple[int, int]:
            tried.append(compiler.programs.shapes.num_pages)
            if tried[-1] > most:
                raise DoesNotFit("too large")
            return 2**20, 0

        monkeypatch.setattr(Compiler, "memory", memory)
        config = Config(model=str(folder), compilation_cache_dir="", hbm_utilization_factor=1.0, max_model_len=1024)
        model, mesh = build.find_model(config), make_mesh(1)
        plan = build.plan_memory(config, model, mesh, build.make_buckets(config, model, mesh), Memory(2**30, 0))
        return list(dict.fromkeys(tried)), plan.compiler.programs.shapes.num_pages

    return plan


def test_a_step_that_is_too_large_beside_all_blocks_is_measured_beside_those_of_one_sequence(planned):
    (all_blocks,), fitting = planned(10**9)
    assert planned(all_blocks - 1) == ([all_blocks, 1024 // 32 + 1], fitting)


def test_a_step_that_is_too_large_beside_one_sequence_ends_the_start(planned):
    with pytest.raises(OutOfMemory, match="too large"):
        planned(1)


@pytest.mark.parametrize("point", ["device.weights", "device.kv"])
def test_a_device_that_has_less_memory_than_it_said_is_told_with_the_sums(folder, monkeypatch, point):
    def reach(here: str) -> None:
        if here == point:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    monkeypatch.setattr(build, "reach", reach)
    config = Config(model=str(folder), compilation_cache_dir="", max_model_len=64, warmup=False)
    with pytest.raises(OutOfMemory, match=r"(?s)less memory than it said.*no room\n  weights .*GiB|MiB.*one KV block"):
        build.build_runner(config, build.find_model(config))
