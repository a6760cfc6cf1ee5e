"""Prefix caching: what is shared, when, and with whom."""

import pytest

from tests.engine.fakes import alone, drain, make_engine, make_request, outputs_of, run


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
    engine, _ = make_engine()
    run(engine, make_request(range(10)))
    stranger = make_request(range(10), **other)
    outputs = run(engine, stranger)
    assert {output.num_cached for output in outputs} == {0}
    assert outputs_of(outputs, stranger) == alone(stranger)


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
