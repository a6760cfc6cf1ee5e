"""Every schedule gives the same output: whatever the engine is made of and whatever happens around a request."""

import random

import pytest

from hex_llm.engine import engine as engine_module
from hex_llm.engine.limits import most_blocks
from hex_llm.engine.request import FinishReason
from hex_llm.engine.scheduler import MOST_PREEMPTIONS
from hex_llm.engine.step import OutOfDeviceMemory
from hex_llm.errors import EngineDead, OutOfMemory
from tests.engine.fakes import VOCAB, alone, bring, drain, logprobs_alone, make_engine, make_request

NUM_SETTINGS = 500
FAULTS = ("dispatch", "read", "read end")
ERRORS = (RuntimeError("the device\nis gone"), ValueError(), SystemExit(3))


def random_engine(rng: random.Random, longest: int, *, rebuilds: bool = False):
    block_size = rng.choice([1, 2, 4, 8])
    max_running = rng.choice([1, 2, 3, 8, 8, 8])
    step_tokens = max_running + rng.choice([0, 1, 5, 16, 64])
    reach = rng.choice([None, None, 2, 3, 5, 9, 16, 40])
    # The longest request alone fills the memory.
    least = most_blocks(longest, block_size, reach=reach, step_tokens=step_tokens)
    return make_engine(
        max_in_flight=rng.choice([0, 1, 1, 2]),
        rebuilds=rebuilds,
        lazy=rng.random() < 0.7,
        max_model_len=longest,
        block_size=block_size,
        num_blocks=1 + least + rng.choice([0, 0, 1, 2, least // 2, 8 * least]),
        max_running=max_running,
        max_prefills=rng.choice([1, 2, 8]),
        step_tokens=step_tokens,
        mixed_tokens=rng.choice([None, max_running]),
        chunked=rng.random() < 0.5,
        prefix_caching=rng.random() < 0.6,
        prefix_unit=block_size * rng.choice([1, 2]),
        reach=reach,
        rope_switch=rng.choice([None, None, 4, 16, 30]),
        num_adapters=rng.choice([1, 1, 2]),
    )


def random_requests(rng: random.Random):
    shared = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(2)]
    tails = [[rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 1, 9]))] for _ in range(16)]
    prompts = [rng.choice(shared)[: rng.choice([0, rng.randrange(25), 24])] + tail for tail in tails]
    return [
        make_request(
            prompt or [0],
            rng.choice([1, 2, 5, 20, 40]),
            seed=rng.choice([None, 1, 2**40 + 1]),
            stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 0, 2, 6])),
            cache_salt=rng.choice(["", "", "pepper"]),
            adapter=rng.choice(["", "", "lora", "another"]),
            logprobs=rng.choice([None, None, 0, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        for prompt in prompts[: rng.randrange(1, 17)]
    ]


def interrupts(rng: random.Random, share: float):
    """A share of the reads is interrupted, before or after they have done their work."""

    def fault(where: str) -> None:
        if where.startswith("read") and rng.random() < share:
            raise KeyboardInterrupt

    return fault


def step_in_spite_of_interrupts(engine):
    while True:
        try:
            return engine.step()
        except KeyboardInterrupt:
            engine.check()
            assert not engine.is_dead


def lose_memory(where: str) -> None:
    raise OutOfDeviceMemory("no room")


def step_for_ever(engine):
    while True:
        if not engine.has_work:
            engine.add(make_request([1], 1))
        bring(engine)
        engine.step()


def same(told, expected, count):
    return [(t.logprob, t.rank, t.top) for t in told] == [(e.logprob, e.rank, e.top[:count]) for e in expected]


@pytest.mark.parametrize("setting", range(NUM_SETTINGS))
def test_every_schedule_gives_the_same_output(setting):
    rng = random.Random(setting)
    requests = random_requests(rng)
    longest = max(len(request.prompt) + request.max_output for request in requests)
    engine, runner = random_engine(rng, longest)
    runner.fault = interrupts(rng, share=rng.choice([0, 0, 0.05, 0.4]))
    arrivals = sorted((rng.choice([0, 0, rng.randrange(60)]), i) for i in range(len(requests)))
    aborts = {rng.randrange(60): rng.choice(requests) for _ in range(rng.choice([0, 0, 3]))}
    aborted: dict[str, FinishReason] = {}
    outputs = {request.id: [] for request in requests}

    for step in range(5000):
        while arrivals and arrivals[0][0] <= step:
            engine.add(requests[arrivals.pop(0)[1]])
        if step in aborts and engine.abort(aborts[step].id):
            aborted[aborts[step].id] = FinishReason.ABORT
        bring(engine)
        for output in step_in_spite_of_interrupts(engine):
            assert output.request_id not in aborted
            outputs[output.request_id].append(output)
        engine.check()
        if not arrivals and not engine.has_work:
            break
    assert not engine.has_work
    assert max(request.num_preemptions for request in requests) <= MOST_PREEMPTIONS

    for request in requests:
        expected, told = alone(request, runner.model), outputs[request.id]
        tokens = [token for output in told for token in output.tokens]
        if request.id in aborted:
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            reason = FinishReason.STOP if expected[-1] in request.stop_ids else FinishReason.LENGTH
            assert [output.finish_reason for output in told] == [None] * (len(told) - 1) + [reason]
        check_logprobs(request, told, tokens, runner.model)


@pytest.mark.parametrize("setting", range(100))
def test_a_request_that_brings_a_part_of_its_answer_goes_on_as_if_that_had_been_made_here(setting):
    rng = random.Random(setting)
    requests = random_requests(rng)
    engine, runner = random_engine(rng, max(len(request.prompt) + request.max_output for request in requests))
    expected = {request.id: alone(request, runner.model) for request in requests}
    brought = {request.id: rng.randrange(len(expected[request.id])) for request in requests}
    for request in requests:
        request.output = expected[request.id][: brought[request.id]]
        request.num_cached = 3 if request.output else 0
        engine.add(request)
    told = {request.id: [] for request in requests}
    while engine.has_work:
        bring(engine)
        for output in engine.step():
            told[output.request_id].append(output)
        engine.check()
    for request in requests:
        outputs, new = told[request.id], expected[request.id][brought[request.id] :]
        assert [token for output in outputs for token in output.tokens] == new
        assert [output.finish_reason is None for output in outputs] == [True] * (len(new) - 1) + [False]
        if brought[request.id]:
            assert {output.num_cached for output in outputs} == {3}
            assert all(output.prompt_logprobs is None for output in outputs)
        if (count := request.sampling.logprobs) is not None:
            about = logprobs_alone(request, [*request.prompt, *expected[request.id]], runner.model)
            assert same([entry for output in outputs for entry in output.logprobs], about[-len(new) :], count)
    fresh = [request for request in requests if not brought[request.id]]
    if engine.limits.prefix_caching:
        assert engine.stats().total_prefix_queries == sum(len(request.prompt) for request in fresh)


def check_logprobs(request, told, tokens, model):
    expected = logprobs_alone(request, [*request.prompt, *tokens], model)
    of_prompt, of_output = expected[: len(request.prompt) - 1], expected[len(request.prompt) - 1 :]
    if (count := request.sampling.logprobs) is None:
        assert all(output.logprobs is None for output in told)
    else:
        assert same([entry for output in told for entry in output.logprobs], of_output, count)
    if (count := request.sampling.prompt_logprobs) is None or not told:
        assert all(output.prompt_logprobs is None for output in told)
    else:
        first, *rest = told[0].prompt_logprobs
        assert first is None
        assert same(rest, of_prompt, count)
        assert all(output.prompt_logprobs is None for output in told[1:])


@pytest.mark.parametrize("setting", range(200))
def test_a_device_that_loses_its_memory_loses_nobody_an_answer(setting, monkeypatch):
    """Again and again, where a step is handed over and where it is read, with aborts in between."""
    monkeypatch.setattr(engine_module, "_REBUILD_S", 0.0)
    rng = random.Random(setting)
    requests = random_requests(rng)
    longest = max(len(request.prompt) + request.max_output for request in requests)
    engine, runner = random_engine(rng, longest, rebuilds=True)
    share, num_lost = rng.choice([0.02, 0.1, 0.3]), 0

    def fault(where: str) -> None:
        nonlocal num_lost
        if rng.random() < share and num_lost < 20:
            num_lost += 1
            raise OutOfDeviceMemory("no room")

    runner.fault = fault
    for request in requests:
        engine.add(request)
    told = {request.id: [] for request in requests}
    aborted = {request.id for request in requests if rng.random() < 0.1}
    for step in range(5000):
        if step == 5:
            aborted = {request_id for request_id in aborted if engine.abort(request_id)}
        bring(engine)
        for output in engine.step():
            told[output.request_id].append(output)
        engine.check()
        assert engine.waits_for_others or not (engine.is_stuck and engine.has_work), "nobody would call it again"
        if not engine.has_work and step > 5:
            break
    assert not engine.has_work
    assert engine.stats().total_ooms == num_lost
    for request in requests:
        expected = alone(request, runner.model)
        tokens = [token for output in told[request.id] for token in output.tokens]
        assert tokens == (expected[: len(tokens)] if request.id in aborted else expected)
        check_logprobs(request, told[request.id], tokens, runner.model)


@pytest.mark.parametrize("where", ["dispatch", "read"])
def test_memory_that_is_lost_a_second_time_too_soon_ends_the_engine(where):
    engine, runner = make_engine(rebuilds=True)
    left = 2

    def fault(here: str) -> None:
        nonlocal left
        left -= here == where
        if not left:
            left = 2
            raise OutOfDeviceMemory("no room")

    runner.fault = fault
    engine.add(make_request([1, 2, 3], 20))
    with pytest.raises(OutOfMemory, match=r"0 s after another had found none; once in 600 s .* no room"):
        step_for_ever(engine)
    assert engine.is_dead
    with pytest.raises(EngineDead, match="OutOfMemory"):
        engine.step()


def test_an_engine_that_waited_for_an_adapter_goes_on_when_memory_is_lost():
    engine, runner = make_engine(rebuilds=True, num_adapters=2)
    request = make_request([1, 2, 3], 5, adapter="lora")
    engine.add(request)
    assert engine.step() == []
    assert engine.is_stuck
    bring(engine)
    runner.fault = lose_memory
    assert engine.step() == []
    assert not engine.is_stuck
    runner.fault = lambda where: None
    tokens = [token for output in drain(engine) for token in output.tokens]
    assert tokens == alone(request)


def test_a_device_without_memory_for_a_new_cache_ends_the_engine(monkeypatch):
    engine, runner = make_engine(rebuilds=True)
    runner.fault = lose_memory
    monkeypatch.setattr(runner, "reset", lambda: lose_memory("reset"))
    engine.add(make_request([1]))
    with pytest.raises(OutOfMemory, match="no memory for the KV cache any more: no room"):
        engine.step()
    assert engine.is_dead


def test_an_engine_that_does_not_rebuild_ends_when_memory_is_lost():
    engine, runner = make_engine()
    runner.fault = lose_memory
    engine.add(make_request([1]))
    with pytest.raises(OutOfMemory, match="no memory on the device: no room"):
        engine.step()
    assert engine.is_dead


@pytest.mark.parametrize("setting", range(100))
def test_an_engine_whose_step_fails_says_so_from_then_on(setting):
    rng = random.Random(setting)
    requests = random_requests(rng)
    engine, runner = random_engine(rng, max(len(request.prompt) + request.max_output for request in requests))
    countdown, where, error = rng.randrange(30), rng.choice(FAULTS), rng.choice(ERRORS)

    def fault(here: str) -> None:
        nonlocal countdown
        countdown -= here == where
        if countdown < 0:
            raise error

    runner.fault = fault
    for request in requests:
        engine.add(request)
    with pytest.raises(type(error)) as first:
        step_for_ever(engine)
    assert first.value is error
    runner.fault = lambda where: None
    late = make_request([1])
    for act in (engine.step, lambda: engine.add(late), engine.step):
        with pytest.raises(EngineDead, match=f"failed with {type(error).__name__}.*; it must be started again") as dead:
            act()
        assert dead.value.__cause__ is error
        assert "\n" not in str(dead.value)
    assert engine.is_dead
    assert not engine.abort(requests[0].id)


@pytest.mark.parametrize("max_in_flight", [0, 1, 2])
def test_an_interrupt_in_the_middle_of_a_dispatch_ends_the_engine(max_in_flight):
    engine, runner = make_engine(max_in_flight=max_in_flight)
    engine.add(make_request(range(10)))

    def fault(where: str) -> None:
        if where == "dispatch":
            raise KeyboardInterrupt

    runner.fault = fault
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineDead, match="failed with KeyboardInterrupt; it"):
        engine.step()


@pytest.mark.parametrize("max_in_flight", [0, 1, 2])
def test_an_interrupted_read_does_not_let_more_steps_be_under_way(max_in_flight):
    engine, runner = make_engine(max_in_flight=max_in_flight)
    request = make_request(range(10), 20)
    engine.add(request)
    deepest = 0
    runner.fault = interrupts(random.Random(0), share=0.5)
    while engine.has_work:
        step_in_spite_of_interrupts(engine)
        deepest = max(deepest, len(runner.unread))
    assert deepest == max_in_flight
    assert request.output == alone(request)
