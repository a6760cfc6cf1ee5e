"""What the scheduler does, one sentence each."""

import random
import time

import numpy as np
import pytest

from hex_llm.engine import scheduler as scheduler_module
from hex_llm.engine.request import FinishReason
from hex_llm.engine.scheduler import MOST_PREEMPTIONS, Scheduler
from hex_llm.engine.step import OutOfDeviceMemory, StepResult
from tests.engine.fakes import alone, drain, make_engine, make_limits, make_request, outputs_of, run


def reasons_of(outputs, request):
    return [o.finish_reason for o in outputs if o.request_id == request.id and o.finish_reason]


def starts(runner, request):
    """The steps in which a request was started, or started again, with the length of the slice."""
    return [
        (number, length)
        for number, step in enumerate(runner.steps)
        for id, start, length in step
        if id == request.id and start == 0
    ]


def lengths(runner):
    return [[length for _, _, length in step] for step in runner.steps]


# Steps


def test_a_prompt_is_one_slice_and_each_further_token_another():
    engine, runner = make_engine()
    request = make_request(range(10), 3)
    outputs = run(engine, request)
    assert lengths(runner) == [[10], [1], [1]]
    assert outputs_of(outputs, request) == alone(request)


def test_the_next_step_is_dispatched_before_the_one_before_is_read():
    engine, runner = make_engine()
    engine.add(make_request(range(10), 3))
    assert engine.step() == []
    assert len(runner.unread) == 1
    assert len(engine.step()) == 1
    assert len(runner.unread) == 1
    assert len(runner.steps) == 2


def test_without_a_step_in_flight_each_step_yields_its_own_token():
    engine, _ = make_engine(max_in_flight=0)
    engine.add(make_request(range(10), 2))
    assert [len(engine.step()), len(engine.step())] == [1, 1]
    assert not engine.has_work


def test_no_step_is_spent_beyond_the_last_token_wanted():
    engine, runner = make_engine()
    run(engine, make_request(range(3), 5))
    assert len(runner.steps) == 5


def test_an_end_token_is_noticed_one_step_late_and_what_follows_is_dropped():
    engine, runner = make_engine()
    request = make_request(range(10), 20)
    end = alone(request)[2]
    request = make_request(range(10), 20, end_ids=[end])
    outputs = run(engine, request)
    assert outputs_of(outputs, request) == alone(request)
    assert outputs_of(outputs, request)[-1] == end
    assert reasons_of(outputs, request) == [FinishReason.STOP]
    assert len(runner.steps) == len(alone(request)) + 1


def test_chunked_a_step_decodes_and_prefills_with_the_decodes_first():
    engine, runner = make_engine(step_tokens=12)
    engine.add(make_request(range(4), 9, id="old"))
    engine.step()
    engine.add(make_request(range(20, 35), 2, id="new"))
    drain(engine)
    assert runner.steps[:4] == [
        [("old", 0, 4)],
        [("old", 4, 1), ("new", 0, 11)],
        [("old", 5, 1), ("new", 11, 4)],
        [("old", 6, 1), ("new", 15, 1)],
    ]


def test_a_step_in_which_nobody_decodes_may_hold_more_than_one_that_others_wait_for():
    engine, runner = make_engine(step_tokens=12, mixed_tokens=9)
    engine.add(make_request(range(14), 4, id="old"))
    engine.step()
    engine.step()
    engine.add(make_request(range(20, 40), 1, id="new"))
    drain(engine)
    assert runner.steps == [
        [("old", 0, 12)],
        [("old", 12, 2)],
        [("old", 14, 1), ("new", 0, 8)],
        [("old", 15, 1), ("new", 8, 8)],
        [("old", 16, 1), ("new", 16, 4)],
    ]


def test_not_chunked_decodes_wait_for_a_prefill_of_several_steps():
    engine, runner = make_engine(step_tokens=12, chunked=False)
    engine.add(make_request(range(4), 3, id="old"))
    engine.step()
    engine.add(make_request(range(20, 35), 2, id="new"))
    drain(engine)
    assert runner.steps == [
        [("old", 0, 4)],
        [("new", 0, 12)],
        [("new", 12, 3)],
        [("old", 4, 1), ("new", 15, 1)],
        [("old", 5, 1)],
    ]


def test_a_step_holds_no_more_prefills_than_allowed():
    engine, runner = make_engine(max_prefills=2)
    run(engine, *(make_request([i] * 3, 1) for i in range(5)))
    assert lengths(runner) == [[3, 3], [3, 3], [3]]


def test_requests_are_served_in_the_order_they_came():
    engine, runner = make_engine(max_running=2, step_tokens=8)
    requests = [make_request([i] * n, 2) for i, n in enumerate([7, 1, 9, 1, 5])]
    outputs = run(engine, *requests)
    assert [starts(runner, request) for request in requests] == [[(0, 7)], [(0, 1)], [(2, 8)], [(3, 1)], [(5, 5)]]
    assert all(outputs_of(outputs, request) == alone(request) for request in requests)


def test_a_short_request_does_not_overtake_a_long_one_that_waits_for_memory():
    engine, runner = make_engine(num_blocks=9, max_running=4, max_model_len=32)
    first, long, short = make_request(range(12), 9), make_request(range(12, 36), 2), make_request([1], 1)
    run(engine, first, long, short)
    [(first_start, _)], [(long_start, _)], [(short_start, _)] = (starts(runner, r) for r in (first, long, short))
    assert first_start == 0
    assert short_start == long_start == 9  # when the first has all its tokens


# Memory


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_the_youngest_gives_way_and_the_oldest_never(max_in_flight):
    engine, _ = make_engine(num_blocks=13, max_in_flight=max_in_flight, max_model_len=48)
    requests = [make_request([i], 45) for i in range(3)]
    outputs = run(engine, *requests)
    assert all(outputs_of(outputs, request) == alone(request) for request in requests)
    assert requests[0].num_preemptions == 0
    assert requests[1].num_preemptions > 0
    assert requests[2].num_preemptions > 0
    last = {output.request_id: i for i, output in enumerate(outputs)}
    assert sorted(last, key=lambda id: last[id]) == [request.id for request in requests]


def test_a_preempted_request_keeps_its_place_and_its_output():
    engine, runner = make_engine(num_blocks=9, max_model_len=32, prefix_caching=False)
    old, young, later = make_request([1] * 5, 20), make_request([2] * 5, 20), make_request([3], 1)
    engine.add(old)
    engine.add(young)
    outputs = []
    while not young.num_preemptions:
        outputs += engine.step()
    engine.add(later)
    sampled = sum(id == young.id for step in runner.steps for id, _, _ in step)
    outputs += drain(engine)
    _, (restart, length) = starts(runner, young)
    assert length == 5 + sampled > 6
    assert starts(runner, old) == [(0, 5)]
    assert starts(runner, later) == [(restart, 1)]
    assert outputs_of(outputs, young) == alone(young)


def test_a_preempted_request_starts_again_only_when_its_last_token_was_read():
    scheduler = Scheduler(make_limits())
    request = make_request(range(5), 9)
    scheduler.add(request)
    step = scheduler.schedule()
    scheduler._preempt(request)
    assert scheduler.schedule() == []
    scheduler.update(step, StepResult(np.array([7]), np.array([True])))
    [again] = scheduler.schedule()
    assert (again.start, again.length, again.fresh) == (0, 6, True)
    assert request.output == [7]


def test_memory_that_is_about_to_come_back_costs_nobody_its_place():
    engine, runner = make_engine(num_blocks=6, max_model_len=20, prefix_caching=False)
    old, young = make_request([1] * 6, 10), make_request([2] * 8, 2)
    engine.add(old)
    engine.add(young)
    for _ in range(3):
        engine.step()
    assert engine.stats().blocks_used == 5  # all there are: three of the young one, which has just ended
    engine.step()
    assert len(runner.steps) == 3  # the old one needs a block, and waited
    drain(engine)
    assert engine.stats().total_preemptions == 0


def test_memory_that_is_about_to_come_back_is_promised_once():
    engine, runner = make_engine(num_blocks=12, prefix_caching=False)
    three, ends = [make_request([i] * 6, 12) for i in range(3)], make_request([3] * 3, 6)
    for request in (*three, ends):
        engine.add(request)
    outputs = [output for _ in range(7) for output in engine.step()]
    assert ends.finish_reason  # its two blocks are on their way back, and each of the three wants one
    outputs += engine.step()
    assert [request.num_preemptions for request in three] == [0, 0, 1]
    assert len(runner.steps) == 7
    outputs += drain(engine)
    assert all(outputs_of(outputs, request) == alone(request) for request in three)


def test_preemptions_stay_few_under_pressure():
    engine, _ = make_engine(num_blocks=33, max_running=16, max_prefills=16, max_model_len=64)
    requests = [make_request([i] * 8, 40) for i in range(24)]
    outputs = run(engine, *requests)
    assert all(outputs_of(outputs, request) == alone(request) for request in requests)
    assert engine.stats().total_preemptions <= 2 * len(requests)
    assert engine.stats().total_steps < 24 * 40 / 2


@pytest.mark.parametrize("max_in_flight", [0, 1])
@pytest.mark.parametrize("reach", [None, 60])
def test_nobody_gives_way_for_ever(max_in_flight, reach):
    """Where there is memory for one and a half of them, some would do so six times."""
    engine, _ = make_engine(
        num_blocks=80 if reach else 65,
        block_size=2,
        max_running=8,
        max_prefills=8,
        max_model_len=120,
        max_in_flight=max_in_flight,
        reach=reach,
    )
    requests = [make_request([i % 40] * 3, 100 - 7 * i % 20) for i in range(60)]
    outputs = run(engine, *requests)
    most = max(request.num_preemptions for request in requests)
    assert most == MOST_PREEMPTIONS
    assert max(output.num_preemptions for output in outputs) == most
    model = engine._runner.model
    assert all(outputs_of(outputs, request) == alone(request, model) for request in requests)


def test_one_that_gave_way_often_keeps_its_memory_even_when_it_is_wanted():
    engine, _ = make_engine(num_blocks=40, max_model_len=32)
    old, young = make_request([1], 20), make_request([2], 20)
    engine.add(old)
    engine.add(young)
    for _ in range(40):
        engine._scheduler.preempt_youngest()
        engine.step()
    drain(engine)
    assert (old.num_preemptions, young.num_preemptions) == (0, MOST_PREEMPTIONS)


def test_one_that_gave_way_often_keeps_its_memory_where_windows_let_go_of_shared_blocks():
    """Of blocks that both have, each may come to need others instead."""
    for num_blocks in range(66, 120, 6):
        engine, _ = make_engine(
            num_blocks=num_blocks, block_size=1, max_running=4, max_model_len=300, step_tokens=4, reach=60
        )
        prompt = [i % 40 for i in range(70)]
        old, young = make_request(prompt, 200, seed=1), make_request(prompt, 200, seed=2)
        engine.add(old)
        for _ in range(26):
            engine.step()
        engine.add(young)
        for _ in range(200):
            engine._scheduler.preempt_youngest()
            engine.step()
        drain(engine)
        assert young.num_preemptions <= MOST_PREEMPTIONS


def test_one_that_gave_way_often_waits_for_one_that_another_engine_computes_and_no_longer():
    """Which cannot give way while its blocks are on their way, and does when they have come."""
    scheduler = Scheduler(make_limits(num_blocks=21, block_size=1, max_model_len=20, prefix_caching=False))
    often, coming = make_request([1, 2], 18), make_request([5] * 10, 5)
    often.num_preemptions, coming.source = MOST_PREEMPTIONS, "unix:x"

    def step() -> None:
        if pieces := scheduler.schedule():
            scheduler.update(pieces, StepResult(np.full(len(pieces), 3), np.full(len(pieces), True)))
        scheduler.check()

    scheduler.add(often)
    step()
    scheduler.add(coming)
    for _ in range(20):
        step()
    assert (len(often.output), coming.is_coming) == (9, True)
    scheduler.complete(coming.id, 3)
    while not often.finish_reason:
        step()
    assert (often.num_preemptions, coming.num_preemptions) == (MOST_PREEMPTIONS, 1)


def serve_without_end(num_blocks: int, num_steps: int) -> tuple[int, int]:
    """Tokens that 64 clients get, who ask again and again, and the longest that one of them waits, in steps. Each could
    have as many tokens as the context, and stops earlier: all may come to need more than there is.
    """
    rng = random.Random(0)
    engine, _ = make_engine(
        num_blocks=num_blocks, block_size=4, max_model_len=600, max_running=32, max_prefills=32, max_in_flight=1
    )
    wanted: dict[str, tuple[int, int]] = {}  # tokens, and since when
    num_tokens = longest = 0

    def ask(now: int) -> None:
        request = make_request([1, 2, 3], 597)
        wanted[request.id] = rng.randrange(20, 400), now
        engine.add(request)

    for _ in range(64):
        ask(0)
    for step in range(num_steps):
        for output in engine.step():
            left, since = wanted[output.request_id]
            wanted[output.request_id] = left - 1, since
            num_tokens += 1
            if left == 1:
                engine.abort(output.request_id)
                longest = max(longest, step - since)
                del wanted[output.request_id]
                ask(step)
    return num_tokens, max(longest, *(num_steps - since for _, since in wanted.values()))


@pytest.mark.parametrize("num_blocks", [301, 601])
def test_that_nobody_gives_way_for_ever_costs_neither_tokens_nor_waits(num_blocks, monkeypatch):
    """A batch that is emptied for one would cost tokens; one that others pass again and again would wait for ever."""
    num_tokens, longest = serve_without_end(num_blocks, 4000)
    monkeypatch.setattr(scheduler_module, "MOST_PREEMPTIONS", 10**9)
    unlimited, longest_unlimited = serve_without_end(num_blocks, 4000)
    assert num_tokens > 0.95 * unlimited
    assert longest < 1.5 * longest_unlimited


def test_what_is_computed_anew_for_other_reasons_does_not_count_as_giving_way():
    engine, _ = make_engine(rebuilds=True, rope_switch=8, max_model_len=64)
    request = make_request(range(5), 20)
    engine.add(request)
    engine.step()
    engine._rebuild(OutOfDeviceMemory("no room"))
    drain(engine)
    assert request.num_preemptions == engine.stats().total_preemptions == 0
    assert engine.stats().total_ooms == 1


def test_a_preempted_request_finds_its_own_prefix_again():
    engine, runner = make_engine(num_blocks=12, max_model_len=40)
    old, young = make_request([1] * 4, 36), make_request([2] * 16, 20)
    outputs = run(engine, old, young)
    assert young.num_preemptions > 0
    restarts = [start for step in runner.steps for id, start, length in step if id == young.id and length > 1]
    assert restarts[0] == 0
    assert restarts[1] > 0
    assert {output.num_cached for output in outputs} == {0}
    assert outputs_of(outputs, young) == alone(young)


# Ends


def test_a_request_can_be_aborted_while_it_waits():
    engine, _ = make_engine(max_running=1)
    first, second = make_request(range(4)), make_request(range(4))
    engine.add(first)
    engine.add(second)
    engine.step()
    assert engine.abort(second.id)
    outputs = drain(engine)
    assert {output.request_id for output in outputs} == {first.id}
    assert second.finish_reason == FinishReason.ABORT


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_a_request_can_be_aborted_after_any_step(steps, max_in_flight):
    engine, _ = make_engine(step_tokens=8, max_in_flight=max_in_flight)
    victim, other = make_request(range(20), 9), make_request(range(5), 9)
    engine.add(victim)
    engine.add(other)
    outputs = [output for _ in range(steps) for output in engine.step()]
    assert engine.abort(victim.id, FinishReason.STOP)
    assert not engine.abort(victim.id)
    told = len(outputs_of(outputs, victim))
    outputs += drain(engine)
    assert outputs_of(outputs, victim) == alone(victim)[:told]
    assert outputs_of(outputs, other) == alone(other)
    assert victim.finish_reason == FinishReason.STOP


def test_a_request_can_be_aborted_after_it_was_preempted():
    engine, _ = make_engine(num_blocks=9, max_model_len=32)
    old, young = make_request([1] * 5, 20), make_request([2] * 5, 20)
    engine.add(old)
    engine.add(young)
    outputs = []
    while not young.num_preemptions:
        outputs += engine.step()
    engine.abort(young.id)
    outputs += drain(engine)
    assert outputs_of(outputs, old) == alone(old)


def test_aborting_what_has_ended_or_never_was_is_no_error():
    engine, _ = make_engine()
    request = make_request(range(4))
    run(engine, request)
    assert not engine.abort(request.id)
    assert not engine.abort("nobody")
    assert request.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_a_row_of_nan_ends_its_request_alone_and_leaves_nothing_behind(max_in_flight):
    engine, runner = make_engine(step_tokens=8, max_in_flight=max_in_flight)
    broken, sound = make_request(range(20), 9), make_request(range(20, 25), 9)
    runner.poison[broken.id] = 2
    outputs = run(engine, broken, sound)
    assert reasons_of(outputs, broken) == [FinishReason.ERROR]
    assert outputs_of(outputs, broken) == alone(broken)[:2]
    assert outputs_of(outputs, sound) == alone(sound)
    again = make_request(range(20), 9)
    outputs = run(engine, again)
    assert {output.num_cached for output in outputs} == {0}
    assert outputs_of(outputs, again) == alone(again)


# Log-probabilities


def test_logprobs_are_trimmed_to_what_was_asked_for():
    engine, _ = make_engine()
    none, own, two = (make_request(range(5), 3, logprobs=count) for count in (None, 0, 2))
    outputs = run(engine, none, own, two)
    told = {o.request_id: [len(entry.top) for entry in o.logprobs] if o.logprobs else None for o in outputs}
    assert told == {none.id: None, own.id: [0], two.id: [2]}


def test_prompt_logprobs_come_with_the_first_token_one_for_each_of_the_prompt():
    engine, _ = make_engine(step_tokens=8)
    outputs = run(engine, make_request(range(20), 3, prompt_logprobs=1))
    assert outputs[0].prompt_logprobs is not None
    first, *rest = outputs[0].prompt_logprobs
    assert first is None
    assert [len(entry.top) for entry in rest if entry] == [1] * 19
    assert [output.prompt_logprobs for output in outputs[1:]] == [None, None]


def test_a_prompt_of_one_token_has_one_empty_logprob():
    engine, _ = make_engine()
    assert run(engine, make_request([1], 1, prompt_logprobs=1))[0].prompt_logprobs == (None,)


# Figures


def test_stats_tell_what_is_in_use():
    engine, _ = make_engine(max_running=1, num_blocks=33)
    engine.add(make_request(range(10)))
    engine.add(make_request(range(10)))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks, stats.blocks_used) == (1, 1, 32, 3)
    drain(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_cached) == (0, 0, 0, 3)


def test_an_engine_that_cannot_move_says_so():
    engine, _ = make_engine()
    engine.add(make_request(range(10)))
    engine._scheduler._slots.clear()
    with pytest.raises(AssertionError, match="none of them can move"):
        engine.step()


def test_a_step_of_256_decodes_costs_little_python():
    count = 256
    limits = make_limits(
        max_running=count, max_prefills=count, step_tokens=4096, num_blocks=8192, block_size=32, max_model_len=1024
    )
    scheduler = Scheduler(limits)
    for i in range(count):
        scheduler.add(make_request([i % 40] * 9, 500))
    result = StepResult(np.ones(count, np.int32), np.ones(count, bool))
    before = scheduler.schedule()
    times = []
    for _ in range(40):
        start = time.perf_counter()
        step = scheduler.schedule()
        scheduler.update(before, result)
        times.append(time.perf_counter() - start)
        before = step
    assert len(before) == count
    assert sorted(times)[20] < 0.01  # a fifteenth of that on an idle core
