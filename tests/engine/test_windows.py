"""Windows: a request gives back what none of its tokens to come can see."""

import numpy as np
import pytest

from hex_llm.engine.admission import resolve_max_output
from hex_llm.engine.limits import most_blocks
from hex_llm.engine.scheduler import Scheduler
from hex_llm.engine.step import StepResult
from tests.engine.fakes import Model, alone, drain, make_engine, make_limits, make_request, outputs_of, run


def peak(engine, *requests):
    """The most blocks that were in use at once, those included that wait for a step, and the outputs."""
    for request in requests:
        engine.add(request)
    most, outputs = 0, []
    while engine.has_work:
        outputs += engine.step()
        engine.check()
        most = max(most, engine.stats().blocks_used)
    return most, outputs


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("max_in_flight", [0, 1, 2])
def test_memory_stays_within_the_window_and_a_step_however_long_the_prompt(chunked, max_in_flight):
    engine, _ = make_engine(
        max_in_flight=max_in_flight, reach=10, max_model_len=1000, num_blocks=300, step_tokens=32, chunked=chunked
    )
    request = make_request([i % 40 for i in range(900)], 50)
    most, outputs = peak(engine, request)
    # What a step sees, and what the steps under way have moved past.
    assert most <= engine.limits.most_blocks + max_in_flight * 32 / 4
    assert outputs_of(outputs, request) == alone(request, Model(reach=10))


def test_an_output_needs_no_more_than_the_window():
    engine, _ = make_engine(reach=10, max_model_len=400, num_blocks=300)
    most, _ = peak(engine, make_request([1], 300))
    assert most <= 5  # 10 tokens touch up to 4 blocks, and one is on its way back


def test_a_request_of_a_hundred_thousand_tokens_fits_in_a_window_of_4096():
    limits = make_limits(max_model_len=2**17, reach=4096, block_size=32, step_tokens=2048, num_blocks=194)
    assert limits.most_blocks == 193 == 1 + (4096 + 2048) // 32
    scheduler = Scheduler(limits)
    scheduler.add(make_request([1] * 100_000, 3))
    step, slices = scheduler.schedule(), 0
    while step:
        slices += 1
        following = scheduler.schedule()
        scheduler.update(step, StepResult(np.array([7]), np.array([True])))
        scheduler.check()
        step = following or scheduler.schedule()
    assert scheduler.stats().total_preemptions == 0
    assert slices == -(-100_000 // 2048) + 2
    assert not scheduler.running


def test_the_shortest_memory_serves_a_request_longer_than_it_and_nothing_less_does():
    shortest = most_blocks(400, 4, reach=10, step_tokens=8) + 1
    limits = {"max_model_len": 400, "reach": 10, "step_tokens": 8, "max_running": 2}
    engine, _ = make_engine(num_blocks=shortest, **limits)
    request = make_request([i % 40 for i in range(200)], 100)
    outputs = run(engine, request)
    assert outputs_of(outputs, request) == alone(request, Model(reach=10))
    assert engine.stats().total_preemptions == 0
    assert resolve_max_output(200, None, make_limits(num_blocks=shortest, **limits)) == 200
    smaller = make_limits(num_blocks=shortest - 1, **limits)
    assert smaller.context == smaller.kv_tokens == 16


@pytest.mark.parametrize("chunked", [True, False])
def test_a_prompt_waits_for_what_it_has_given_back_and_does_not_start_again_for_it(chunked):
    engine, runner = make_engine(
        num_blocks=most_blocks(200, 4, reach=3, step_tokens=8) + 1,
        reach=3,
        max_model_len=200,
        step_tokens=8,
        max_running=2,
        chunked=chunked,
    )
    run(engine, make_request([i % 40 for i in range(64)], 1, id="long"))
    assert [piece for step in runner.steps for piece in step] == [("long", start, 8) for start in range(0, 64, 8)]


def test_nobody_is_started_while_a_prompt_waits_for_memory():
    engine, runner = make_engine(num_blocks=9, reach=9, max_model_len=200, step_tokens=16, max_running=4)
    long, short = make_request([1] * 80, 2), make_request([2], 2)
    outputs = run(engine, long, short)
    first_of_short = next(n for n, step in enumerate(runner.steps) for id, _, _ in step if id == short.id)
    last_of_prompt = next(n for n, step in enumerate(runner.steps) for id, start, _ in step if start + 16 >= 80)
    assert first_of_short >= last_of_prompt
    assert outputs_of(outputs, short) == alone(short, Model(reach=9))


def test_what_was_given_back_is_found_until_its_memory_is_wanted():
    engine, runner = make_engine(reach=5, max_model_len=200, num_blocks=40)
    first = make_request([i % 40 for i in range(60)], 1)
    run(engine, first)
    computed = runner.num_tokens
    again, shorter = make_request(first.prompt, 1), make_request(first.prompt[:30], 1)
    outputs = run(engine, again, shorter)
    assert (again.num_cached, shorter.num_cached) == (56, 28)
    assert runner.num_tokens - computed == 4 + 2
    assert outputs_of(outputs, shorter) == alone(shorter, Model(reach=5))


def test_blocks_that_were_given_back_before_their_step_was_read_are_offered_too():
    engine, _ = make_engine(reach=2, max_model_len=200, num_blocks=80, step_tokens=8)
    prompt = [i % 40 for i in range(64)]
    run(engine, make_request(prompt, 1))
    found = [make_request(prompt[:length], 1) for length in range(5, 64, 4)]
    run(engine, *found)
    assert [request.num_cached for request in found] == [len(request.prompt) - 1 for request in found]


def test_a_prefix_is_found_where_only_the_blocks_within_reach_are_left():
    engine, runner = make_engine(reach=6, max_model_len=200, num_blocks=16, step_tokens=8, max_running=2)
    prompt = [i % 40 for i in range(60)]  # 15 blocks: all there are
    run(engine, make_request(prompt, 1))
    run(engine, make_request([39] * 20, 1))  # takes the place of some
    computed = runner.num_tokens
    again = make_request(prompt, 4)
    outputs = run(engine, again)
    assert again.num_cached == 56
    assert runner.num_tokens - computed == 4 + 3
    assert outputs_of(outputs, again) == alone(again, Model(reach=6))
    start = make_request(prompt[:9], 1)
    run(engine, start)
    assert start.num_cached == 0  # its blocks were those whose place was taken


@pytest.mark.parametrize("max_in_flight", [0, 1, 2])
def test_a_preempted_request_goes_on_from_what_is_within_reach(max_in_flight):
    engine, runner = make_engine(reach=9, max_model_len=80, max_in_flight=max_in_flight)
    request = make_request(range(20), 50)
    engine.add(request)
    outputs = [output for _ in range(30) for output in engine.step()]
    assert request.num_freed > 5
    engine._scheduler._preempt(request)
    engine.check()
    outputs += drain(engine)
    assert outputs_of(outputs, request) == alone(request, Model(reach=9))
    (_, first, _), (_, again, _) = (piece for step in runner.steps for piece in step if piece[2] > 1)
    assert (first, again >= 40) == (0, True)


@pytest.mark.parametrize("steps", range(1, 12))
@pytest.mark.parametrize("max_in_flight", [0, 1, 2])
def test_a_request_that_has_given_blocks_back_can_be_aborted_after_any_step(steps, max_in_flight):
    engine, _ = make_engine(reach=5, step_tokens=8, max_in_flight=max_in_flight, max_model_len=200)
    victim, other = make_request([i % 40 for i in range(60)], 9), make_request(range(5), 9)
    engine.add(victim)
    engine.add(other)
    outputs = [output for _ in range(steps) for output in engine.step()]
    engine.abort(victim.id)
    engine.check()
    outputs += drain(engine)
    assert outputs_of(outputs, other) == alone(other, Model(reach=5))


def test_a_window_as_wide_as_the_context_frees_nothing():
    engine, _ = make_engine(reach=64)
    plain, _ = make_engine()
    assert engine.limits.most_blocks == plain.limits.most_blocks
    assert peak(engine, make_request(range(20), 40))[0] == peak(plain, make_request(range(20), 40))[0]
