"""What is kept of lowered programs."""

import dataclasses

import jax
import pytest

from hex_llm import build
from hex_llm.engine.request import SamplingParams
from hex_llm.models import decoder
from hex_llm.runner import lowering
from hex_llm.runner.buckets import SEPARATE, Bucket
from hex_llm.runner.lowering import Lowering
from hex_llm.runner.programs import Admit, Forward, Programs, all_programs
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


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_made_again(programs, tmp_path, caplog, damage):
    Lowering(programs, tmp_path).lower(Admit())
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage)
    Lowering(programs, tmp_path).lower(Admit())
    assert f"{path} is damaged" in caplog.text
    assert [*tmp_path.iterdir()] == [path]
    caplog.clear()
    Lowering(programs, tmp_path).lower(Admit())
    assert not caplog.text


def test_a_folder_that_cannot_be_used_costs_a_warning(programs, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    Lowering(programs, tmp_path / "file").lower(Admit()).compile()
    assert "cannot be written" in caplog.text


def test_the_name_of_a_file_stands_for_all_that_goes_in(programs, tmp_path, monkeypatch):
    def name(programs: Programs) -> str:
        program = Forward(Bucket(8, 8, 8, decode=True))
        arguments, _ = programs.arguments(program)
        return Lowering(programs, tmp_path)._digest(program, arguments)

    first = name(programs)
    assert name(programs) == first
    arch, shapes = programs.arch, programs.shapes
    others = [
        dataclasses.replace(programs, arch=dataclasses.replace(arch, norm_eps=arch.norm_eps * 2)),
        dataclasses.replace(programs, shapes=dataclasses.replace(shapes, num_pages=shapes.num_pages + 1)),
        dataclasses.replace(programs, dtype="float16"),
    ]
    assert len({first, *map(name, others)}) == 4
    monkeypatch.setattr(lowering, "_sources", lambda package: iter([("one.py", b"other code")]))
    lowering._surroundings.cache_clear()
    try:
        assert name(programs) != first
    finally:
        lowering._surroundings.cache_clear()
