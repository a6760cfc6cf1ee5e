"""What simulated workers do: hand-checked runs, and what holds of every run."""

import math
from collections import deque
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hex_llm.bench.disagg.load import Load, Request, draw_requests
from hex_llm.bench.disagg.rates import Bounds, Link, chunked_steps, whole_steps
from hex_llm.bench.disagg.simulation import Run, Setting, run_requests, simulate
from hex_llm.bench.disagg.worker import Worker
from hex_llm.engine.admission import new_request
from hex_llm.engine.request import SamplingParams
from hex_llm.engine.scheduler import Scheduler
from hex_llm.engine.step import StepResult
from tests.bench.slow_worker import CHUNKED, RATES, SPLIT, TIMES, WHOLE
from tests.engine.fakes import make_limits


def requests_of(*sizes):
    """Of arrival in milliseconds, tokens of the prompt and tokens of the answer."""
    return [Request(number, ms / 1000, prompt, answer) for number, (ms, prompt, answer) in enumerate(sizes)]


def run(setting, *sizes, rates=RATES) -> Run:
    return run_requests(setting, rates, requests_of(*sizes))


def times(done: Run):
    """First and last token of each request, in milliseconds."""
    return [
        (pytest.approx(1000 * each.first_s, abs=1e-3), pytest.approx(1000 * each.last_s, abs=1e-3))
        for each in done.requests
    ]


def gaps(done: Run, side=-1):
    return sorted(
        round(1000 * gap.seconds, 3) for worker in done.sides[side] for gap in worker.gaps for _ in range(gap.count)
    )


def all_gaps(done: Run):
    return [gap for side in done.sides for worker in side for gap in worker.gaps]


class TestHandChecked:
    def test_a_request_alone_takes_its_prompts_step_and_a_step_for_each_token_after(self):
        # 100 tokens are computed as 128: 148 ms. Then two decode steps of 11.
        assert times(run(CHUNKED, (5, 100, 3))) == [(153, 175)]
        # Whole prompts are computed as 512 at least.
        assert times(run(WHOLE, (5, 100, 3))) == [(537, 559)]

    def test_a_prompt_longer_than_a_step_takes_several(self):
        # 256 tokens, then 44 that are computed as 128: 276 and 148 ms.
        assert times(run(CHUNKED, (0, 300, 2))) == [(424, 435)]

    def test_with_chunks_a_decode_goes_on_beside_a_prompt_in_smaller_pieces(self):
        # The first decodes from 148 on. The second comes at 150, when the steps to 159 and 170 are planned: its 200
        # tokens are 127 and 73 of two steps of 128, beside one decode, 11 + 63.5 ms each.
        done = run(CHUNKED, (0, 100, 6), (150, 200, 1))
        assert times(done) == [(148, 148 + 11 + 11 + 74.5 + 74.5 + 11), (319, 319)]
        assert gaps(done) == [11, 11, 11, 74.5, 74.5]

    def test_without_chunks_all_decodes_wait_for_a_prompt(self):
        # The decode steps end at 543 and 554 when the second prompt is looked at; it takes 532 ms of its own.
        done = run(WHOLE, (0, 100, 6), (540, 200, 1))
        assert times(done) == [(532, 532 + 11 * 5 + 532), (1086, 1086)]
        assert gaps(done) == [11, 11, 11, 11, 543]

    def test_a_prompt_handed_over_goes_on_when_its_last_pages_are_there(self):
        # 256 tokens by 276 ms, whose pages travel during the next step; the other 44 by 424, and 4.4 ms for theirs.
        done = run(SPLIT, (0, 300, 3))
        assert times(done) == [(424, 424 + 4.4 + 22)]
        assert gaps(done) == [11, 15.4]
        assert done.requests[0].complete_s == pytest.approx(0.4284, abs=1e-6)

    def test_pages_wait_for_each_other_on_a_link(self):
        # Two prompts of 100 tokens in one step; their pages take 10 ms each, one after the other. The second
        # waits for the step that the first one is in.
        done = run(SPLIT, (0, 1, 1), (1, 100, 2), (1, 100, 2))
        first = 148 + 276  # 200 tokens are computed as 256
        assert [each.complete_s for each in done.requests[1:]] == pytest.approx(
            [(first + 10) / 1e3, (first + 20) / 1e3]
        )
        assert times(done) == [(148, 148), (first, first + 21), (first, first + 32)]

    def test_an_answer_of_one_token_is_not_handed_over(self):
        done = run(SPLIT, (0, 100, 1))
        assert times(done) == [(148, 148)]
        assert math.isnan(done.requests[0].complete_s)
        assert not all_gaps(done)

    def test_what_a_token_sees_costs_time(self):
        rates = replace(RATES, times=replace(TIMES, decode_context=1e-6, prefill_context=1e-6))
        # 256 tokens see 128 each on average, and 44 see 256 + 22; the decode has 301 tokens, then 302.
        first = 424 + (256 * 128 + 44 * 278) / 1000
        assert times(run(CHUNKED, (0, 300, 3), rates=rates)) == [(first, first + 22 + 0.301 + 0.302)]

    def test_no_step_is_shorter_than_one_that_reads_the_weights(self):
        rates = replace(RATES, times=replace(TIMES, prefill_step=0.0, prefill_token=1e-6))
        assert times(run(CHUNKED, (0, 100, 1), rates=rates)) == [(10, 10)]


class TestMemory:
    def test_who_runs_out_of_memory_gives_way_and_is_computed_again(self):
        # 22 tokens hold both prompts and three tokens more of each; the younger starts again when the older has ended.
        rates = replace(RATES, bounds=replace(RATES.bounds, kv_tokens=22))
        done = run(CHUNKED, (0, 8, 10), (1, 8, 10), rates=rates)
        assert [each.preemptions for each in done.requests] == [0, 1]
        assert done.requests[1].last_s > done.requests[0].last_s
        assert sum(gap.count for gap in all_gaps(done)) == 18

    def test_prompts_wait_where_the_memory_for_decoding_is_full(self):
        few = replace(RATES, bounds=replace(RATES.bounds, kv_tokens=1000))
        load = Load(rate=2.5, prompt=100, answer=200, count=60)
        full, free = (simulate(SPLIT, rates, load) for rates in (few, RATES))
        (waited, handed), (not_waited, handed_at_once) = (
            (
                np.mean([each.first_s - each.arrival_s for each in done.requests]),
                np.mean([each.complete_s - each.first_s for each in done.requests]),
            )
            for done in (full, free)
        )
        # Pages that find no room stay where they are, until there is none left for prompts either.
        assert handed > 100 * handed_at_once
        assert waited > 3 * not_waited
        assert all(each.output == each.answer for each in full.requests)
        assert most_kept(full) > 900
        assert most_kept(free) < 500

    def test_more_sequences_than_slots_wait(self):
        rates = replace(RATES, bounds=replace(RATES.bounds, max_decode_seqs=2))
        done = run(CHUNKED, (0, 10, 50), (0, 10, 50), (0, 10, 5), rates=rates)
        assert done.requests[2].first_s > min(each.last_s for each in done.requests[:2])


def most_kept(done: Run) -> int:
    """The most tokens of prompts that had their first token and still waited for pages to be taken."""
    events = [(each.first_s, each.prompt) for each in done.requests]
    events += [(each.complete_s, -each.prompt) for each in done.requests]
    return int(max(np.cumsum([tokens for _, tokens in sorted(events)])))


SIZES = st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=25)
SETTINGS = st.sampled_from(
    [CHUNKED, WHOLE, SPLIT, Setting(plain=3), Setting(prefill=2, decode=1), Setting(prefill=1, decode=2)]
)


@settings(max_examples=150, deadline=None)
@given(SIZES, SETTINGS, st.integers(345, 1500), st.integers(1, 8))
@example([(0, 1, 1), (0, 1, 31), (0, 300, 17)], SPLIT, 345, 2)  # gives way, and would end with the same step again
def test_every_request_gets_every_token_once_and_nothing_is_left_behind(sizes, setting, kv_tokens, slots):
    bounds = replace(RATES.bounds, kv_tokens=kv_tokens, max_decode_seqs=slots)
    done = run(setting, *sizes, rates=replace(RATES, bounds=bounds))
    assert all(each.output == each.answer for each in done.requests)
    assert sum(gap.count for gap in all_gaps(done)) == sum(answer - 1 for _, _, answer in sizes)
    assert all(each.arrival_s < each.first_s <= each.last_s for each in done.requests)
    for worker in (worker for side in done.sides for worker in side):
        assert (worker.used, worker.queued, worker.outstanding, worker.num_requests, worker.in_flight) == (0,) * 5
        assert all(stop <= start for (_, stop), (start, _) in pairwise(worker.busy))
    # A token's time is counted once: what lies between first and last is the sum of the gaps.
    between = sum(each.last_s - each.first_s for each in done.requests)
    assert sum(gap.seconds * gap.count for gap in all_gaps(done)) == pytest.approx(between)
    assert all(gap.seconds > 0 for gap in all_gaps(done))


class TestAgainstTheScheduler:
    """The worker plans what the engine's scheduler plans, step by step."""

    @settings(max_examples=100, deadline=None)
    @given(
        arrivals=st.lists(
            st.tuples(st.integers(0, 30), st.integers(2, 200), st.integers(1, 20)), min_size=1, max_size=20
        ),
        chunked=st.booleans(),
        slots=st.integers(1, 12),
    )
    def test_steps_are_the_same(self, arrivals, chunked, slots):
        bounds = Bounds(kv_tokens=8000, max_decode_seqs=slots, step_tokens=96, mixed_tokens=32)
        steps = chunked_steps(bounds) if chunked else replace(whole_steps(bounds), tokens=96)
        limits = make_limits(
            num_blocks=8001, block_size=1, max_running=slots, max_prefills=steps.prefills, step_tokens=96,
            mixed_tokens=32, chunked=chunked, prefix_caching=False, max_model_len=400,
        )  # fmt: skip
        engine = planned(_Engine(limits), arrivals)
        # A prompt of which one token is left counts as a decode there, which is not followed here.
        assume(all(length > 1 for step in engine for _, length in step.prompts))
        assert planned(_Modelled(replace(RATES, bounds=bounds), steps), arrivals) == engine


class Planned(NamedTuple):
    decodes: int
    prompts: list[tuple[int, int]]  # the request's number, and how many tokens


def planned(engine, arrivals) -> list[Planned]:
    """The steps of an engine that gets its requests before the round with their number, one step ahead."""
    found, in_flight, rounds = [], deque(), 0
    while True:
        for number, (due, prompt, answer) in enumerate(arrivals):
            if due == rounds:
                engine.add(number, prompt, answer)
        step = engine.plan()
        if step is not None:
            in_flight.append(step)
            found.append(engine.describe(step))
        if len(in_flight) > 1 or (in_flight and step is None):
            engine.read(in_flight.popleft())
        elif not in_flight and rounds > 30:
            return found
        rounds += 1


class _Engine:
    def __init__(self, limits):
        self._scheduler, self._limits = Scheduler(limits), limits

    def add(self, number, prompt, answer):
        sampling = SamplingParams(temperature=0, max_tokens=answer)
        self._scheduler.add(new_request(str(number), [1] * prompt, sampling, self._limits))

    def plan(self):
        return self._scheduler.schedule() or None

    def describe(self, step):
        prompts = sorted((int(each.request.id), each.length) for each in step if each.start < len(each.request.prompt))
        return Planned(len(step) - len(prompts), prompts)

    def read(self, step):
        self._scheduler.update(step, StepResult(np.zeros(len(step), np.int32), np.ones(len(step), bool)))


class _Modelled:
    def __init__(self, rates, steps):
        self._worker = Worker(rates, steps)

    def add(self, number, prompt, answer):
        self._worker.add(Request(number, 0.0, prompt, answer))

    def plan(self):
        return self._worker.plan(0.0)

    def describe(self, step):
        return Planned(step.decodes, sorted((request.number, length) for request, length in step.slices))

    def read(self, step):
        self._worker.read(step)


def test_prompts_queue_as_the_formula_for_one_server_with_a_fixed_time_says():
    # A prompt fills a step of 256 tokens, 276 ms; Poisson arrivals. Mean wait: rho * D / (2 * (1 - rho)).
    service = 0.276
    for load in (0.3, 0.6, 0.8):
        done = simulate(SPLIT, RATES, Load(rate=load / service, prompt=256, answer=1, count=30_000, seed=1))
        waits = [each.first_s - each.arrival_s - service for each in done.requests]
        assert np.mean(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.06)


def test_prompts_do_not_touch_decodes_elsewhere_and_do_touch_those_beside():
    fast = replace(RATES, link=Link(1, math.inf))
    stream, prompts = (0, 10, 400), [(1000 + 300 * number, 250, 1) for number in range(10)]
    for setting, disturbed in ((SPLIT, False), (CHUNKED, True), (WHOLE, True)):
        alone, beside = run(setting, stream, rates=fast), run(setting, stream, *prompts, rates=fast)
        assert (gaps(alone) != gaps(beside)) == disturbed, setting
    assert set(gaps(run(SPLIT, stream, *prompts, rates=fast))) == {11}


def test_lengths_and_times_are_drawn_as_asked_for():
    load = Load(rate=4.0, prompt=1000, answer=100, prompt_spread=0.5, count=20_000)
    drawn = draw_requests(load)
    prompts = np.array([each.prompt for each in drawn])
    assert prompts.mean() == pytest.approx(1000, rel=0.02)
    assert prompts.std() == pytest.approx(500, rel=0.05)
    assert {each.answer for each in drawn} == {100}
    assert drawn[-1].arrival_s == pytest.approx(5000, rel=0.03)
    # A higher rate brings the same requests sooner.
    faster = draw_requests(replace(load, rate=8.0))
    assert [each.prompt for each in faster] == prompts.tolist()
    assert faster[-1].arrival_s == pytest.approx(drawn[-1].arrival_s / 2)
    cut = draw_requests(replace(load, longest=1500))
    assert max(each.prompt + each.answer for each in cut) == 1500
