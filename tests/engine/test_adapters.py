"""Who waits for an adapter, who gets a slot of the device, and who loses it."""

import pytest

from hex_llm.engine.carrier import AdapterHere, AdapterLost
from hex_llm.engine.engine import Engine
from hex_llm.engine.limits import Limits
from hex_llm.engine.request import Request
from hex_llm.errors import ConfigError, RequestError
from tests.engine.fake_carrier import FakeCarrier
from tests.engine.fakes import FakeRunner, alone, bring, drain, make_engine, make_limits, make_request


def with_adapters(num_adapters: int, **changes) -> tuple[Engine, FakeRunner, FakeCarrier]:
    carrier = FakeCarrier()
    engine, runner = make_engine(num_adapters=num_adapters, carrier=carrier, **changes)
    return engine, runner, carrier


def ask(engine: Engine, adapter: str, max_tokens: int = 4, caller: str = "") -> Request:
    request = make_request([1, 2, 3], max_tokens, adapter=adapter, caller=caller)
    engine.add(request)
    return request


def step(engine: Engine, *, count: int = 1) -> None:
    for _ in range(count):
        bring(engine)
        engine.step()
        engine.check()


def run_alone(engine: Engine, *adapters: str) -> None:
    for adapter in adapters:
        request = ask(engine, adapter)
        drain(engine)
        assert request.output == alone(request)


def hear(engine: Engine, carrier: FakeCarrier) -> None:
    while carrier.said:
        engine.hear(carrier.said.popleft())


def is_running(engine: Engine, request: Request) -> bool:
    return request.id in engine._scheduler.running


def test_an_engine_without_adapters_refuses_a_request_that_names_one():
    engine, _ = make_engine()
    with pytest.raises(RequestError, match="'gs://adapters/a', and adapters are not served here"):
        ask(engine, "a")
    assert not engine.has_work
    with pytest.raises(ConfigError, match="num_adapters=-1 must be at least 0"):
        make_limits(num_adapters=-1)


def test_a_request_waits_for_its_adapter_and_those_behind_it_pass():
    engine, _, carrier = with_adapters(2)
    first, other, base = ask(engine, "a"), ask(engine, "b"), ask(engine, "")
    assert carrier.asked == ["a", "b"]
    carrier.bring("b")
    hear(engine, carrier)
    for _ in range(10):
        engine.step()
        engine.check()
    assert other.output == alone(other)
    assert base.output == alone(base)
    assert engine.take_begun() == [other.id, base.id]
    assert engine.is_stuck
    assert engine.has_work
    assert engine.waits_for_others
    assert engine.step() == []
    carrier.bring("a")
    hear(engine, carrier)
    drain(engine)
    assert first.output == alone(first)
    assert engine.is_idle


def test_an_adapter_is_asked_for_once_and_not_at_all_where_it_is_there():
    engine, runner, carrier = with_adapters(2)
    requests = [ask(engine, "a") for _ in range(3)]
    drain(engine)
    requests += [ask(engine, "a") for _ in range(3)]
    drain(engine)
    assert all(request.output == alone(request) for request in requests)
    assert carrier.log == [("fetch", "a")]
    assert runner.order.count("load a") == 1


def test_an_adapter_is_loaded_between_the_steps_before_and_those_with_it():
    engine, runner, _ = with_adapters(1, max_in_flight=2)
    base = ask(engine, "", 12)
    step(engine, count=4)
    first = ask(engine, "a", 6)
    drain(engine)
    second = ask(engine, "b")
    drain(engine)
    assert [each for each in runner.order if each != "step"] == ["load a", "load b"]
    assert "step" in runner.order[: runner.order.index("load a")]
    assert [each.output for each in (base, first, second)] == [alone(each) for each in (base, first, second)]


def test_of_several_that_have_come_one_is_loaded_a_step():
    """Those who decode wait for a load, and the memory plan counts one that is on its way."""
    engine, runner, carrier = with_adapters(4, max_running=8)
    base = ask(engine, "", 20)
    step(engine, count=2)
    requests = [ask(engine, name) for name in "abcd"]
    carrier.bring_all()
    hear(engine, carrier)
    before = len(runner.order)
    drain(engine)
    assert runner.order[before : before + 8] == ["load a", "step", "load b", "step", "load c", "step", "load d", "step"]
    assert [each.output for each in (base, *requests)] == [alone(each) for each in (base, *requests)]


def test_one_whose_turn_to_be_loaded_is_to_come_loses_its_slot_to_nobody_behind_it():
    engine, runner, carrier = with_adapters(2)
    run_alone(engine, "x", "y")
    first, second, behind = ask(engine, "a"), ask(engine, "b"), ask(engine, "y")
    carrier.bring_all()
    hear(engine, carrier)
    engine.step()
    assert runner.adapters == ["", "a", "y"]
    assert not is_running(engine, behind)
    engine.step()
    assert runner.adapters == ["", "a", "b"]
    drain(engine)
    assert [each.output for each in (first, second, behind)] == [alone(each) for each in (first, second, behind)]


def test_a_slot_is_rewritten_while_the_last_step_that_reads_it_is_under_way():
    engine, runner, carrier = with_adapters(1)
    first, second = ask(engine, "a", 30), ask(engine, "b")
    carrier.bring_all()
    hear(engine, carrier)
    for _ in range(5):
        engine.step()
    assert runner.unread
    engine.abort(first.id)
    engine.step()
    assert runner.adapters == ["", "b"]
    drain(engine)
    assert second.output == alone(second)


def test_the_adapter_that_was_used_least_lately_gives_way():
    engine, runner, carrier = with_adapters(2)
    run_alone(engine, "a", "b", "a", "c")
    assert runner.adapters == ["", "a", "c"]
    carrier.log.clear()
    run_alone(engine, "a", "b")
    assert carrier.log == [("fetch", "b")]
    stats = engine.stats()
    assert (stats.adapters, stats.adapters_used, stats.adapters_loading) == (2, 0, 0)
    assert (stats.total_adapter_loads, stats.total_adapter_evictions) == (4, 2)


def test_an_adapter_is_used_until_its_last_request_has_ended():
    engine, runner, _ = with_adapters(2)
    long = ask(engine, "a", 20)
    step(engine)
    short = ask(engine, "b")
    drain(engine)
    assert len(long.output) > len(short.output)
    run_alone(engine, "c")
    assert runner.adapters == ["", "a", "c"]


def test_an_adapter_whose_request_runs_stays_however_long_ago_that_began():
    engine, runner, _ = with_adapters(2)
    long = ask(engine, "a", 50)
    step(engine)
    run = [ask(engine, name) for name in "bcdbcd"]
    while not all(request.finish_reason for request in run):
        step(engine)
        assert is_running(engine, long)
    assert runner.adapters[1] == "a"
    assert engine.stats().adapters_used == 1
    drain(engine)
    assert [each.output for each in (long, *run)] == [alone(each) for each in (long, *run)]


def test_what_is_closed_for_one_that_waits_takes_no_other_request_before_it():
    engine, _, _ = with_adapters(1)
    first = ask(engine, "a", 12)
    step(engine)
    rare, late = ask(engine, "b"), ask(engine, "a")
    while not first.finish_reason:
        step(engine)
        assert not is_running(engine, late)
    step(engine, count=2)
    assert is_running(engine, rare)
    drain(engine)
    assert [each.output for each in (rare, late)] == [alone(each) for each in (rare, late)]
    assert engine.stats().total_adapter_loads == 3


def test_what_is_closed_for_one_that_goes_away_is_open_again():
    engine, _, _ = with_adapters(1)
    first = ask(engine, "a", 40)
    step(engine)
    rare = ask(engine, "b")
    step(engine)
    late = ask(engine, "a")
    step(engine)
    assert not is_running(engine, late)
    engine.abort(rare.id)
    step(engine)
    assert is_running(engine, late)
    assert is_running(engine, first)
    drain(engine)


def test_the_adapter_with_the_fewest_running_requests_is_closed_and_the_busiest_half_never():
    engine, _, _ = with_adapters(4, max_running=16)
    for name, count in (("a", 3), ("b", 1), ("c", 2), ("d", 3)):
        for _ in range(count):
            ask(engine, name, 20)
    while engine.stats().running < 9:
        step(engine)
    waiting = [ask(engine, name) for name in "efgh"]
    step(engine)
    late = {name: ask(engine, name) for name in "abcd"}
    step(engine, count=2)
    assert {name for name, request in late.items() if is_running(engine, request)} == {"a", "d"}
    drain(engine)
    assert all(request.output == alone(request) for request in (*waiting, *late.values()))


def test_no_adapter_starves_however_many_requests_come_for_others():
    engine, _, _ = with_adapters(2, max_running=8)
    rare = None
    for count in range(400):
        ask(engine, "ab"[count % 2], 5)
        step(engine)
        if count == 50:
            rare = ask(engine, "c")
        if rare is not None and is_running(engine, rare):
            break
    else:
        raise AssertionError("it never begins")
    drain(engine)


def test_what_the_first_in_the_queue_waits_for_is_not_taken_for_one_behind_it():
    """Which would then lose it again, and so on for ever."""
    engine, runner, carrier = with_adapters(1, num_blocks=11, max_model_len=40)
    big = make_request(range(30), 8)
    engine.add(big)
    engine.step()
    first = make_request(range(20), 4, adapter="a")
    engine.add(first)
    carrier.bring_all()
    hear(engine, carrier)
    engine.step()
    assert runner.adapters == ["", "a"]
    second = ask(engine, "b")
    while not big.finish_reason:
        step(engine)
        assert runner.adapters == ["", "a"]
    drain(engine)
    assert engine.stats().total_adapter_loads == 2
    assert [each.output for each in (first, second)] == [alone(each) for each in (first, second)]


def test_where_it_comes_later_the_adapter_of_one_ahead_takes_the_slot_of_one_behind():
    engine, runner, carrier = with_adapters(1, max_running=1)
    base = ask(engine, "", 20)
    engine.step()
    first, second = ask(engine, "a"), ask(engine, "b")
    for name in "ba":
        carrier.bring(name)
        hear(engine, carrier)
        engine.step()
        engine.check()
        assert runner.adapters == ["", name]
    assert carrier.asked == ["b"]  # again
    drain(engine)
    assert [each.output for each in (base, first, second)] == [alone(each) for each in (base, first, second)]


def test_a_caller_that_has_more_than_half_of_the_slots_takes_none_of_others():
    engine, runner, _ = with_adapters(4)
    for adapter, caller in (("b1", "b"), ("c1", "c"), ("a1", "a"), ("a2", "a")):
        ask(engine, adapter, caller=caller)
        drain(engine)
    flood = [ask(engine, f"a{number}", caller="a") for number in range(3, 30)]
    while not all(request.finish_reason for request in flood):
        late = ask(engine, "c1", max_tokens=1, caller="c")
        step(engine, count=2)
        assert late.finish_reason is not None, "it waits for its adapter, or for others"
    assert set(runner.adapters) == {"", "c1", "a27", "a28", "a29"}  # b1 went where the caller had half of the slots
    assert all(request.output == alone(request) for request in flood)
    ask(engine, "b1", caller="b")
    drain(engine)
    assert set(runner.adapters) == {"", "c1", "b1", "a28", "a29"}


def test_a_caller_closes_no_more_of_others_than_it_may_take():
    engine, _, _ = with_adapters(4, max_running=16)
    for adapter, caller in (("b1", "b"), ("b2", "b"), ("a1", "a"), ("a2", "a")):
        ask(engine, adapter, 30, caller=caller)
    step(engine, count=6)
    flood = [ask(engine, f"a{number}", caller="a") for number in range(3, 9)]
    step(engine)
    late = {adapter: ask(engine, adapter, caller="b") for adapter in ("b1", "b2")}
    step(engine, count=2)
    assert [name for name, request in late.items() if is_running(engine, request)] == ["b2"]
    drain(engine)
    assert all(request.output == alone(request) for request in (*flood, *late.values()))


def test_an_adapter_that_nobody_waits_for_any_more_is_cancelled():
    engine, runner, carrier = with_adapters(1)
    first, second = ask(engine, "a"), ask(engine, "a")
    engine.abort(first.id)
    assert carrier.log == [("fetch", "a")]
    engine.abort(second.id)
    assert carrier.log == [("fetch", "a"), ("cancel", "a")]
    assert engine.is_idle
    engine.hear(AdapterHere("a", "a"))
    engine.check()
    assert engine.is_idle
    assert "load a" not in runner.order
    run_alone(engine, "a")


def test_what_has_come_and_is_wanted_no_longer_is_let_go_of():
    engine, runner, carrier = with_adapters(1)
    first, second = ask(engine, "a", 20), ask(engine, "b")
    step(engine, count=2)
    assert engine.stats().adapters_loading == 1
    engine.abort(second.id)
    assert engine.stats().adapters_loading == 0
    assert ("cancel", "b") not in carrier.log
    drain(engine)
    assert runner.adapters == ["", "a"]
    assert first.output == alone(first)


def test_an_adapter_that_cannot_be_had_ends_those_that_wait_for_it_and_nobody_else():
    engine, _, carrier = with_adapters(2)
    good, base = ask(engine, "good", 20), ask(engine, "")
    step(engine)
    bad = [ask(engine, "bad") for _ in range(3)]
    lost = AdapterLost("bad", "No.", "adapter_invalid", 404)
    assert engine.hear(lost) == [request.id for request in bad]
    carrier.asked.remove("bad")
    assert engine.hear(lost) == []
    assert engine.hear(AdapterLost("good", "No.", "adapter_invalid", 404)) == []  # which is there
    engine.check()
    assert ("cancel", "bad") not in carrier.log
    drain(engine)
    assert [each.output for each in (good, base)] == [alone(each) for each in (good, base)]
    assert all(request.output == [] for request in bad)
    again = ask(engine, "bad")
    assert carrier.asked == ["bad"]
    drain(engine)
    assert again.output == alone(again)


def test_one_that_gives_way_finds_its_adapter_again():
    engine, runner, _ = with_adapters(1, num_blocks=9, max_model_len=32, max_running=2)
    requests = [ask(engine, "a", 20), ask(engine, "a", 20), ask(engine, "b", 20)]
    drain(engine)
    assert engine.stats().total_preemptions > 0
    assert [each.output for each in requests] == [alone(each) for each in requests]
    assert [each for each in runner.order if each != "step"] == ["load a", "load b"]


def test_limits_with_adapters_need_a_carrier():
    limits: Limits = make_limits(num_adapters=1)
    with pytest.raises(AssertionError, match="adapters need slots and a carrier"):
        Engine(FakeRunner(limits), limits)
