"""Requests that join with all but one of their tokens computed: a step that only decodes takes them in."""

import dataclasses

import numpy as np
import pytest

from hex_llm.engine.request import SamplingParams
from hex_llm.runner.packed_step import PackedStep
from hex_llm.runner.step_wire import Step
from tests.checkpoints import write_llama
from tests.runner.engines import make_engine, run, sharing, tokens

PROMPTS = [np.random.default_rng(number).integers(3, 320, 1 + 8 * number).tolist() for number in range(6)]
KINDS = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"seed": 3},
    {"seed": 4, "top_k": 20, "repetition_penalty": 1.2},
    {"seed": 5, "logit_bias": {17: 4.0}, "min_tokens": 3},
    {"temperature": 0, "frequency_penalty": 0.5},
]
ASKED = [(prompt, SamplingParams(max_tokens=10, **kind)) for prompt, kind in zip(PROMPTS, KINDS, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder):
    return make_engine(folder, max_prefill_seqs=8, enable_chunked_prefill=True)


def record(monkeypatch, runner) -> list[PackedStep]:
    steps, run_step = [], runner.run
    monkeypatch.setattr(runner, "run", lambda packed: (steps.append(packed), run_step(packed))[1])
    return steps


def test_a_request_that_lacks_one_token_joins_in_a_step_that_only_decodes(engine, monkeypatch):
    caching = sharing(engine, prefix_caching=True)
    first = [tokens(outputs) for outputs in run(caching, *ASKED)]  # computes what the same requests find then
    steps = record(monkeypatch, engine._runner)
    alone = [tokens(outputs) for each in ASKED for outputs in run(caching, each)]
    assert all(packed.bucket.decode for packed in steps)
    assert sum(len(packed.seats) for packed in steps) == len(ASKED)
    steps.clear()
    together = [tokens(outputs) for outputs in run(caching, *ASKED)]
    assert all(packed.bucket.decode for packed in steps)
    assert max(len(packed.seats) for packed in steps) == len(ASKED)
    assert together == alone == first


def test_its_tokens_are_those_of_a_step_with_room_for_prompts(folder, engine):
    plain = sharing(engine, prefix_caching=False)  # here the prompts are computed, all in mixed steps but the shortest
    expected = [tokens(run(plain, each)[0]) for each in ASKED]
    caching = sharing(engine, prefix_caching=True)
    run(caching, *ASKED)
    assert [tokens(run(caching, each)[0]) for each in ASKED] == expected
    assert caching.stats().total_prefix_hits > 0


def test_one_whose_prompt_is_to_be_scored_does_not(engine, monkeypatch):
    steps = record(monkeypatch, engine._runner)
    (outputs,) = run(engine, ([7, 8], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)))
    assert not steps[0].bucket.decode
    assert not steps[0].seats
    assert outputs[0].prompt_logprobs is not None


def test_one_joins_beside_prompts_without_a_seat(engine, monkeypatch):
    caching = sharing(engine, prefix_caching=True)
    expected = [tokens(outputs) for outputs in run(caching, ASKED[3], ASKED[4])]
    steps = record(monkeypatch, engine._runner)
    longer = (PROMPTS[5][::-1], SamplingParams(temperature=0, max_tokens=3))
    got = [tokens(outputs) for outputs in run(caching, ASKED[3], ASKED[4], longer)]
    assert got[:2] == expected
    assert not steps[0].bucket.decode
    assert not steps[0].seats


def test_whoever_runs_the_same_steps_from_the_wire_has_the_same_on_its_device(folder, engine, monkeypatch):
    leader, follower = (make_engine(folder, max_prefill_seqs=8, enable_chunked_prefill=True)._runner for _ in range(2))
    steps = record(monkeypatch, leader)
    leading = dataclasses.replace(engine.limits, prefix_caching=True)
    leads = type(engine)(leader, leading)
    for _ in range(2):
        run(leads, *ASKED)
    assert any(packed.seats for packed in steps)
    for packed in steps:
        follower.run(Step.of(packed).packed())
    for mine, other in ((leader._slots, follower._slots), (leader._history, follower._history)):
        for name in mine.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))
    for mine, other in zip(leader._kv, follower._kv, strict=True):
        np.testing.assert_array_equal(mine[1:], other[1:])


def test_a_seat_with_a_page_that_is_not_there_is_noticed_on_the_host(engine, monkeypatch):
    packer = engine._runner._packer
    monkeypatch.setattr(packer, "_shapes", dataclasses.replace(packer._shapes, num_pages=1))
    with pytest.raises(AssertionError, match="pages"):
        run(sharing(engine), ([9], SamplingParams(max_tokens=1)))
