"""Prefix caching: what is shared, when, and with whom."""

import pytest

from tests.engine.fakes import Model, alone, drain, make_engine, make_request, outputs_of, run


def test_an_equal_prefix_is_computed_once():
    engine, runner = make_engine()
    first, second = make_request(range(10)), make_request([*range(8), 30, 31])
    run(engine, first)
    computed = runner.num_tokens
    outputs = run(engine, second)
    assert runner.num_tokens - computed == 2 + 3
    assert {output.num_cached for output in outputs} == {8}
    assert outputs_of(outputs, second) == alone(second)
    assert (engine.stats().total_prefix_queries, engine.stats().total_prefix_hits) == (20, 8)


def test_the_output_of_a_request_is_a_prefix_for_the_next():
    engine, _ = make_engine()
    first = make_request(range(6), 8)
    run(engine, first)
    second = make_request([*range(6), *alone(first), 1])
    assert {output.num_cached for output in run(engine, second)} == {12}


def test_the_last_token_of_a_prompt_is_always_computed():
    engine, _ = make_engine()
    run(engine, make_request(range(8)))
    second = make_request(range(8))
    outputs = run(engine, second)
    assert {output.num_cached for output in outputs} == {4}
    assert outputs_of(outputs, second) == alone(second)


@pytest.mark.parametrize("other", [{"cache_salt": "b"}, {"adapter": "b"}])
def test_another_salt_or_adapter_shares_no_prefix(other):
    engine, _ = make_engine(num_adapters=1)
    run(engine, make_request(range(10)))
    stranger = make_request(range(10), **other)
    outputs = run(engine, stranger)
    assert {output.num_cached for output in outputs} == {0}
    assert outputs_of(outputs, stranger) == alone(stranger)


def test_a_prompt_above_the_ropes_switch_shares_no_prefix_with_one_below():
    engine, _ = make_engine(rope_switch=16)
    short, long = make_request(range(14), 2), make_request(range(20))
    run(engine, short)
    outputs = run(engine, long)
    assert long.num_cached == 0
    assert outputs_of(outputs, long) == alone(long, Model(rope_switch=16))
    short, long = make_request(range(16), 1), make_request(range(17))
    outputs = run(engine, short, long)
    assert (short.num_cached, long.num_cached) == (12, 16)
    assert outputs_of(outputs, short) == alone(short, Model(rope_switch=16))
    assert outputs_of(outputs, long) == alone(long, Model(rope_switch=16))


def test_a_sequence_that_grows_beyond_the_ropes_switch_is_computed_anew_once():
    engine, runner = make_engine(rope_switch=16)
    first, other = make_request(range(10), 20), make_request(range(30, 35), 20)
    outputs = run(engine, first, other)
    for request in (first, other):
        assert outputs_of(outputs, request) == alone(request, runner.model)
        starts = [start for step in runner.steps for name, start, _ in step if name == request.id]
        assert starts.count(0) == 2
    lengths = [length for step in runner.steps for name, start, length in step if name == first.id and start == 0]
    assert lengths == [10, 17]
    following = make_request([*range(10), *alone(first, runner.model), 1])
    outputs = run(engine, following)
    assert following.num_cached == 28  # what was computed anew, not what was before
    assert outputs_of(outputs, following) == alone(following, runner.model)


def test_those_that_grow_beyond_the_ropes_switch_together_are_computed_anew_in_the_order_they_came():
    engine, runner = make_engine(rope_switch=16, step_tokens=32)
    requests = [make_request(range(first, first + 10), 20) for first in (0, 10, 20)]
    run(engine, *requests)
    anew = [name for step in runner.steps[1:] for name, start, _ in step if start == 0]
    assert anew == [request.id for request in requests]


def test_a_request_that_ends_at_the_ropes_switch_is_not_computed_anew():
    engine, runner = make_engine(rope_switch=16)
    request = make_request(range(10), 7)
    assert outputs_of(run(engine, request), request) == alone(request, runner.model)
    assert [start for step in runner.steps for _, start, _ in step].count(0) == 1


def test_hits_are_reported_in_units_and_used_in_blocks():
    engine, runner = make_engine(prefix_unit=16)
    run(engine, make_request(range(30), 1))
    computed = runner.num_tokens
    outputs = run(engine, make_request(range(30), 1))
    assert [output.num_cached for output in outputs] == [16]
    assert runner.num_tokens - computed == 2


def test_a_block_is_not_found_before_the_step_that_fills_it_was_read():
    engine, _ = make_engine()
    first, second, third = (make_request(range(10), 9) for _ in range(3))
    engine.add(first)
    engine.step()
    engine.add(second)
    engine.step()  # admits the second, and only then reads the step that computed the first
    engine.add(third)
    outputs = drain(engine)
    assert (second.num_cached, third.num_cached) == (0, 8)
    assert outputs_of(outputs, third) == alone(third)


def test_prompt_logprobs_are_computed_whatever_the_cache_holds():
    engine, _ = make_engine()
    run(engine, make_request(range(10)))
    outputs = run(engine, make_request(range(10), prompt_logprobs=1))
    assert {output.num_cached for output in outputs} == {0}
    assert len(outputs[0].prompt_logprobs or ()) == 10


def test_without_prefix_caching_nothing_is_shared():
    engine, runner = make_engine(prefix_caching=False)
    run(engine, make_request(range(10), 1), make_request(range(10), 1))
    run(engine, make_request(range(10), 1))
    assert runner.num_tokens == 30
    assert engine.stats().total_prefix_queries == 0
