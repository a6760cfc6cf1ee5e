import pytest

from hex_llm import build
from hex_llm.engine.request import SamplingParams
from hex_llm.runner.buckets import SEPARATE
from hex_llm.runner.programs import all_programs
from tests.checkpoints import write_llama
from tests.runner.engines import make_engine, run, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("model"))


def test_programs_that_were_run_on_padding_leave_no_trace(folder, monkeypatch):
    monkeypatch.setattr(build, "TOGETHER", SEPARATE)
    asked = [
        ([5, 6, 7], SamplingParams(temperature=0, max_tokens=6)),
        ([8] * 20, SamplingParams(seed=3, max_tokens=6)),
        ([9] * 9, SamplingParams(temperature=0, presence_penalty=1.5, max_tokens=6)),
    ]
    engine = make_engine(folder, enable_chunked_prefill=True)
    before = [tokens(outputs) for outputs in run(engine, *asked)]
    runner = engine._runner
    runner.rehearse(runner._packer._buckets)
    assert [tokens(outputs) for outputs in run(engine, *asked)] == before
    fresh = make_engine(folder, enable_chunked_prefill=True)
    fresh._runner.rehearse(fresh._runner._packer._buckets)
    assert [tokens(outputs) for outputs in run(fresh, *asked)] == before


def test_every_program_is_run(folder, monkeypatch):
    monkeypatch.setattr(build, "TOGETHER", SEPARATE)
    runner = make_engine(folder, enable_chunked_prefill=True)._runner
    buckets, get, run = runner._packer._buckets, runner._compiler.get, []
    monkeypatch.setattr(runner._compiler, "get", lambda each: (run.append(each), get(each))[1])
    runner.rehearse(buckets)
    assert {*run} == {*all_programs(buckets)}
