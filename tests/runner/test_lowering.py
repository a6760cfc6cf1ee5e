"""What is kept of lowered programs."""

import dataclasses
import errno
import hashlib
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractMesh

from hex_llm import build
from hex_llm.engine.request import SamplingParams
from hex_llm.models import decoder
from hex_llm.models.abstract import abstract
from hex_llm.parallel.mesh import TENSOR
from hex_llm.runner import lowering
from hex_llm.runner.buckets import SEPARATE, Bucket
from hex_llm.runner.lowering import Lowering
from hex_llm.runner.programs import Admit, Forward, Programs, ScorePrompt, all_programs
from tests.checkpoints import write_llama
from tests.runner.engines import make_engine, run, tokens

ASKED = [
    ([5, 6, 7], SamplingParams(temperature=0, max_tokens=4, logprobs=2)),
    ([8] * 20, SamplingParams(seed=3, top_p=0.9, repetition_penalty=1.2, max_tokens=4, prompt_logprobs=1)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def programs(model) -> Programs:
    return make_engine(model, compilation_cache_dir="")._runner._compiler.programs


def no_tracing(*arguments):
    raise AssertionError("The model is traced.")


@pytest.mark.parametrize("variants", ["together", "separate"])
def test_a_second_start_traces_nothing_and_answers_the_same(model, tmp_path, monkeypatch, variants):
    if variants == "separate":
        monkeypatch.setattr(build, "TOGETHER", SEPARATE)
    flags = {"enable_chunked_prefill": True, "warmup": True}
    expected = run(make_engine(model, **flags | {"compilation_cache_dir": ""}), *ASKED)
    first = make_engine(model, **flags | {"compilation_cache_dir": str(tmp_path)})
    kept = {path.name for path in (tmp_path / "lowered").iterdir()}
    assert len(kept) >= len({*all_programs(first._runner._packer._buckets)})
    monkeypatch.setattr(decoder, "forward", no_tracing)
    monkeypatch.setattr(lowering, "_write", no_tracing)
    second = make_engine(model, **flags | {"compilation_cache_dir": str(tmp_path)})
    assert {path.name for path in (tmp_path / "lowered").iterdir()} == kept
    for engine in (first, second):
        for got, wanted in zip(run(engine, *ASKED), expected, strict=True):
            assert tokens(got) == tokens(wanted)
            assert [each.logprobs for each in got] == [each.logprobs for each in wanted]
            assert [each.prompt_logprobs for each in got] == [each.prompt_logprobs for each in wanted]


def test_what_is_donated_stays_so(programs, tmp_path):
    donated = jax.tree.leaves(programs.history)
    for folder in (tmp_path, tmp_path, None):  # made, kept, and without any
        compiled = Lowering(programs, folder).lower(Admit()).compile()
        assert "jit_admit" in str(compiled.as_text())
        assert compiled.memory_analysis().alias_size_in_bytes == sum(a.size * a.dtype.itemsize for a in donated)


@pytest.fixture(autouse=True)
def warn_anew():
    lowering._warn.cache_clear()


DAMAGES = {
    "empty": lambda whole: b"",
    "short": lambda whole: whole[:10],
    "a bit": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "something else": lambda whole: hashlib.sha256(b"something else").digest() + b"something else",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(programs, tmp_path, caplog, damage):
    Lowering(programs, tmp_path).lower(Admit())
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    Lowering(programs, tmp_path).lower(Admit())
    assert "made again" in caplog.text
    assert str(path) in caplog.text
    assert [*tmp_path.iterdir()] == [path]
    caplog.clear()
    lowering._warn.cache_clear()
    Lowering(programs, tmp_path).lower(Admit())
    assert not caplog.text


def test_a_folder_that_cannot_be_used_costs_one_warning(programs, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "folder"
    for program in (Admit(), ScorePrompt(64)):
        Lowering(programs, folder).lower(program).compile()
    assert [record.message for record in caplog.records if "cannot be written to" in record.message] == [
        f"{folder} cannot be written to (Not a directory): programs are traced again at the next start."
    ]


def test_what_cannot_be_written_whole_leaves_nothing(programs, tmp_path, caplog, monkeypatch):
    def full(path: Path, target: Path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    Lowering(programs, tmp_path).lower(Admit())
    assert "No space left on device" in caplog.text
    assert not [*tmp_path.iterdir()]


def test_a_program_that_cannot_be_exported_is_lowered_all_the_same(programs, tmp_path, caplog, monkeypatch):
    def fail(*arguments):
        raise NotImplementedError

    monkeypatch.setattr(lowering.export, "export", fail)
    assert Lowering(programs, tmp_path).lower(Admit()).compile()
    assert "cannot be kept" in caplog.text
    assert not [*tmp_path.iterdir()]


def test_code_that_has_changed_on_the_disk_since_it_was_imported_is_not_taken_for_what_was_traced(
    programs, tmp_path, monkeypatch
):
    monkeypatch.setattr(lowering, "_digest_of_code", lambda: "other code")
    Lowering(programs, tmp_path).lower(Admit())
    assert not [*tmp_path.iterdir()]


def test_the_name_of_a_file_stands_for_all_that_goes_in(programs, tmp_path, monkeypatch):
    def name(programs: Programs) -> str:
        return Lowering(programs, tmp_path)._digest(Forward(Bucket(8, 8, 8, decode=True)))

    first = name(programs)
    assert name(programs) == first
    arch, shapes = programs.arch, programs.shapes
    others = [
        dataclasses.replace(programs, arch=dataclasses.replace(arch, query_scale=arch.query_scale * 2)),
        dataclasses.replace(programs, shapes=dataclasses.replace(shapes, num_pages=shapes.num_pages + 1)),
        dataclasses.replace(programs, dtype="float16"),
    ]
    names = [first, *map(name, others)]
    with jax.default_matmul_precision("float32"):
        names.append(name(programs))
    device = jax.devices()[0]
    about = {"device_kind": device.device_kind, "client": device.client, "core_count": 132}
    things = [
        (lowering, "_CODE", "other code"),
        (jax, "__version__", "0.0"),
        (jax, "default_backend", lambda: "gpu"),
        (jax, "device_count", lambda: 99),
        (jax, "devices", lambda: [SimpleNamespace(**about)]),
        (jax, "devices", lambda: [SimpleNamespace(**about | {"core_count": 114})]),
        (jax, "devices", lambda: [SimpleNamespace(**about | {"device_kind": "other"})]),
        (jax, "devices", lambda: [SimpleNamespace(**about | {"client": SimpleNamespace(platform_version="other")})]),
    ]
    for owner, attribute, value in things:
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            names.append(name(programs))
    assert len({*names}) == len(names)


def test_it_stands_for_the_models_numbers_where_devices_share_the_work_too(programs, tmp_path):
    """Two models can have weights of the same shapes, and differ in how they rotate heads."""
    arch, mesh = programs.arch, AbstractMesh((2,), (TENSOR,))
    params = abstract(type(programs.params), arch, mesh, programs.dtype)  # pyright: ignore[reportArgumentType]
    split = dataclasses.replace(programs, mesh=mesh, params=params)
    other = dataclasses.replace(split, arch=dataclasses.replace(arch, query_scale=arch.query_scale * 2))
    every = [Forward(Bucket(8, 8, 8, decode=True)), ScorePrompt(64)]
    names = {Lowering(each, tmp_path)._digest(program) for each in (programs, split, other) for program in every}
    assert len(names) == 6


def test_a_program_that_knows_nothing_of_the_pages_is_kept_once(programs, tmp_path):
    more = dataclasses.replace(programs, shapes=dataclasses.replace(programs.shapes, num_pages=1000))
    for each in (programs, more):
        Lowering(each, tmp_path).lower(Admit())
    assert len([*tmp_path.iterdir()]) == 1
