"""One engine computes prompts, another goes on: what goes between them, what is kept, and who is told."""

import random

import pytest

from hex_llm.engine import outgoing
from hex_llm.engine.request import FinishReason
from hex_llm.engine.router import Router
from hex_llm.errors import RequestError
from tests.engine.fake_carrier import FakeCarrier
from tests.engine.fake_porter import FakePorter
from tests.engine.fake_replicas import FakeReplica, Sink, add, check_empty, connected, routed
from tests.engine.fakes import alone, make_engine, make_request


def several(router: Router, **changes) -> list[FakeReplica]:
    port: dict[str, FakePorter] = {}
    return connected(router, lambda: FakeReplica(porter=FakePorter(port, f"address {len(port)}"), **changes))


def run(replicas: list[FakeReplica], most: int = 2000) -> None:
    for _ in range(most):
        if not any(each.is_busy for each in replicas):
            break
        for each in replicas:
            each.step()
    else:
        raise AssertionError("there is no end to it")
    for each in replicas:
        if not each.dead:
            each.engine.check()
            assert each.engine.is_idle
            assert each.porter
            each.porter.check_empty()


def computed(replica: FakeReplica) -> int:
    return replica.engine._runner.num_tokens  # type: ignore[attr-defined]


def sent(replica: FakeReplica) -> int:
    assert replica.porter
    return replica.porter.num_sent


def answered(sink: Sink) -> bool:
    return sink.tokens == alone(sink.request) and not sink.errors


@routed(2, num_prefill=1)
async def test_the_first_computes_prompts_and_one_token_and_the_second_nothing_but_decodes(router):
    prefill, decode = several(router)
    sinks = [add(router, [n] * 9, 6) for n in range(3)]
    run([prefill, decode])
    assert all(map(answered, sinks))
    assert computed(prefill) == 3 * 9
    assert computed(decode) == 3 * 5
    assert {length for step in decode.engine._runner.steps for _, _, length in step} == {1}  # type: ignore[attr-defined]
    check_empty(router)


@routed(2, num_prefill=1)
async def test_the_first_token_comes_before_the_second_engine_has_anything(router):
    prefill, decode = several(router)
    sink = add(router, range(9), 6)
    for _ in range(3):
        prefill.step()
    assert len(sink.tokens) == 1
    assert decode.engine.stats().running == 0
    assert prefill.engine.stats().blocks_held == 3
    run([prefill, decode])
    assert answered(sink)


@routed(2, num_prefill=1)
async def test_blocks_are_on_their_way_while_the_rest_of_the_prompt_is_computed(router):
    prefill, decode = several(router, step_tokens=8)
    sink = add(router, range(40), 3)
    prefill.step()
    decode.step()
    prefill.step()
    decode.step()
    assert sent(prefill) >= 2
    assert sink.tokens == []
    run([prefill, decode])
    assert answered(sink)
    assert decode.engine.stats().total_received_blocks == sent(prefill) == 10


@routed(2, num_prefill=1)
async def test_blocks_of_a_step_are_copied_before_the_next_one_whoever_asks_for_them_later(router):
    prefill, decode = several(router, step_tokens=8)
    sink = add(router, range(40), 3)
    for _ in range(3):
        prefill.step()  # nobody has asked yet
    steps, copies = prefill.engine._runner.order, []  # type: ignore[attr-defined]
    assert steps[:4] == ["step", "copy", "step", "copy"], steps
    decode.step()
    prefill.step()
    copies = [each for each in prefill.engine._runner.order if each == "copy"]  # type: ignore[attr-defined]
    run([prefill, decode])
    assert answered(sink)
    assert len(copies) <= 4 + 1
    assert sent(prefill) == 10
    outgoing = prefill.engine._handovers._outgoing  # type: ignore[union-attr]
    assert (outgoing._num_early, outgoing._requests, outgoing._asked) == (0, {}, {})


@routed(2, num_prefill=1)
async def test_who_asks_while_a_step_is_waited_for_gets_what_is_there(router):
    prefill, decode = several(router)
    add(router, range(9), 3)
    for _ in range(2):
        prefill.step()
    add(router, [5] * 20, 3)
    runner = prefill.engine._runner
    runner.num_looks = 3  # type: ignore[attr-defined]

    seen = []

    def wait() -> None:
        runner.num_looks -= 1  # type: ignore[attr-defined]
        decode.step()
        prefill.hear()
        seen.append(sent(prefill))

    prefill.engine.while_waiting = wait
    assert sent(prefill) == 0
    prefill.step()
    prefill.step()  # which waits for the one before
    assert max(seen) >= 3
    prefill.engine.while_waiting = lambda: None
    runner.num_looks = 0  # type: ignore[attr-defined]
    run([prefill, decode])


@pytest.mark.parametrize("count", [2, 5])
def test_what_several_answers_have_in_common_is_computed_once_and_sent_once(count):
    @routed(2, num_prefill=1)
    async def test(router):
        prefill, decode = several(router)
        sinks = [add(router, range(30), 6, seed=n, temperature=1.0, group="one") for n in range(count)]
        run([prefill, decode])
        assert all(map(answered, sinks))
        assert computed(prefill) == 30 + (count - 1) * 2  # of each but the first the last two, which fill no block
        assert sent(prefill) == 8 + (count - 1)

    test()


@routed(2, num_prefill=1)
async def test_a_prefix_that_the_second_engine_has_is_not_sent_again(router):
    prefill, decode = several(router)
    first = add(router, range(20), 4)
    run([prefill, decode])
    before = sent(prefill)
    second = add(router, [*range(20), 1, 2], 4)
    run([prefill, decode])
    assert answered(first)
    assert answered(second)
    assert (before, sent(prefill) - before) == (5, 1)


@routed(2, num_prefill=1)
async def test_one_that_wants_one_token_is_not_handed_over(router):
    prefill, decode = several(router)
    sink = add(router, range(9), 1)
    run([prefill, decode])
    assert answered(sink)
    assert sink.finish_reason == FinishReason.LENGTH
    assert computed(decode) == 0


@routed(2, num_prefill=1)
async def test_a_prompt_whose_first_token_ends_it_leaves_nothing_on_either_side(router):
    prefill, decode = several(router)
    first = alone(make_request(range(9), 1))[0]
    sink = add(router, range(9), 6, stop_token_ids=[first])
    run([prefill, decode])
    assert sink.tokens == [first]
    assert sink.finish_reason == FinishReason.STOP
    check_empty(router)


@routed(2, num_prefill=1)
async def test_the_first_engine_waits_when_the_second_has_no_room(router):
    prefill, decode = several(router, num_blocks=9, max_model_len=24)
    sinks = [add(router, [n] * 12, 8) for n in range(8)]
    most_held = 0
    for _ in range(400):
        for each in (prefill, decode):
            each.step()
        most_held = max(most_held, prefill.engine.stats().blocks_held)
    assert most_held >= 6
    run([prefill, decode])
    assert all(map(answered, sinks))


@routed(2, num_prefill=1)
async def test_blocks_that_nobody_takes_are_given_free_after_a_while(router):
    prefill, decode = several(router)
    sink = add(router, range(9), 6)
    for _ in range(3):
        prefill.step()
    assert prefill.engine.stats().blocks_held == 3
    assert prefill.engine.expire(0.0) == []
    late = prefill.engine._handovers._outgoing._requests[sink.request.id].since + outgoing.HOLD_S  # type: ignore[union-attr]
    assert prefill.engine.expire(late + 1) == [sink.request.id]
    assert prefill.engine.stats().blocks_used == 0
    run([prefill, decode])  # it is refused, and computed again
    assert answered(sink)
    assert router.replicas[0].num_requests == 0


@routed(3, num_prefill=1)
async def test_where_the_second_engine_is_lost_another_fetches_what_the_first_still_has(router):
    told: list[tuple[int, bool]] = []
    router.on_send = lambda replica, again: told.append((replica, again))
    prefill, *decode = several(router)
    sink = add(router, range(20), 6)
    for _ in range(3):
        prefill.step()
    (there,) = [each for each in decode if each.inbox]
    there.die()
    run([prefill, *decode])
    assert answered(sink)
    assert computed(prefill) == 20
    first = 1 + decode.index(there)
    assert told == [(0, False), (first, False), (3 - first, True)]


@routed(2, num_prefill=1)
async def test_while_there_is_no_second_engine_the_first_goes_on_by_itself_and_the_other_way_round(router):
    replicas = several(router)
    sinks = [add(router, [n] * 9, 12) for n in range(4)]
    for _ in range(4):
        for each in replicas:
            each.step()
    replicas[1].die()
    run(replicas)
    assert all(map(answered, sinks))
    back = FakeReplica(porter=FakePorter({}, "alone"))
    router.join(1, back.client)
    back.get_ready()
    replicas[0].die()
    sinks = [add(router, [n] * 9, 12) for n in range(4)]
    run([back])
    assert all(map(answered, sinks))
    check_empty(router)


@routed(2, num_prefill=1)
async def test_when_the_first_is_lost_after_the_token_the_second_says_what_it_lacks(router):
    replicas = several(router)
    sink = add(router, range(20), 6)
    for _ in range(3):
        replicas[0].step()
    assert len(sink.tokens) == 1
    replicas[0].die()
    run(replicas)
    assert answered(sink)


@routed(3, num_prefill=1)
async def test_answers_go_where_there_is_room(router):
    prefill, *decode = several(router)
    for n in range(12):
        add(router, [n % 3] * random.Random(n).randrange(4, 30), 20)
        run_a_while = [prefill, *decode]
        for each in run_a_while:
            each.step()
    counts = [each.engine.stats().running for each in decode]
    assert min(counts) >= 1
    run([prefill, *decode])


@routed(3, num_prefill=1)
async def test_answers_to_one_question_go_to_one_engine_which_gets_what_they_share_once(router):
    prefill, *decode = several(router)
    sinks = [add(router, range(18), 6, group="one", seed=n) for n in range(3)]
    run([prefill, *decode])
    assert all(map(answered, sinks))
    assert sorted(len(each.added) for each in decode) == [0, 3]
    assert sent(prefill) == 18 // 4 + 3  # blocks of four tokens; the last one is each answer's own


@routed(2, num_prefill=1)
async def test_min_tokens_is_of_the_whole_answer(router):
    replicas = several(router)
    sink = add(router, range(9), 6, min_tokens=5)
    run(replicas)
    assert answered(sink)


@routed(2, num_prefill=1)
async def test_a_first_token_that_ends_it_is_waited_for_though_the_second_engine_first_says_that_it_gets_none(
    router,
):
    prefill, decode = several(router)
    first = alone(make_request(range(9), 1))[0]
    sink = add(router, range(9), 6, stop_token_ids=[first])
    prefill.step()
    prefill.mute()
    prefill.step()  # it has ended, and the router does not know
    decode.step()
    prefill.step()
    decode.step()
    assert sink.tokens == []
    prefill.unmute()
    run([prefill, decode])
    assert sink.finish_reason == FinishReason.STOP
    assert computed(prefill) == 9
    check_empty(router)


@routed(2, num_prefill=1)
async def test_one_that_ends_with_its_first_token_is_no_transfer_that_failed(router):
    prefill, decode = several(router)
    first = alone(make_request(range(9), 1))[0]
    sink = add(router, range(9), 6, stop_token_ids=[first])
    prefill.step()
    decode.step()
    prefill.mute()
    prefill.step()
    decode.step()
    prefill.unmute()
    run([prefill, decode])
    assert sink.finish_reason == FinishReason.STOP
    assert decode.engine.stats().total_transfers_lost == 0


@routed(2, num_prefill=1)
async def test_a_death_that_both_engines_tell_of_counts_once_whoever_is_heard_first(router):
    prefill, decode = several(router)
    sink = add(router, range(20), 6)
    prefill.step()
    decode.step()
    prefill.step()
    prefill.step()
    assert len(sink.tokens) == 1
    prefill.mute()
    prefill.die()
    decode.step()  # says that it cannot have the blocks
    prefill.unmute()
    assert not router._held
    run([prefill, decode])
    assert answered(sink)
    check_empty(router)


@routed(2, num_prefill=1)
async def test_what_cannot_be_had_from_the_first_engine_it_goes_on_with_itself(router):
    prefill, decode = several(router)
    assert decode.porter
    decode.porter._port = {}  # it finds nobody there
    sinks = [add(router, [n] * 9, 6) for n in range(3)]
    run([prefill, decode])
    assert all(map(answered, sinks))
    assert computed(decode) == 0
    assert decode.engine.stats().total_transfers_lost == 3 * 2
    check_empty(router)


@routed(2, num_prefill=1)
async def test_what_the_second_engine_answers_the_first_gives_free_though_it_never_heard_that_it_was_taken(
    router,
):
    prefill, decode = several(router)
    assert prefill.porter
    sink = add(router, range(9), 6)
    while not decode.engine.stats().total_received:
        prefill.step()
        decode.step()
    prefill.porter.said.clear()
    run([prefill, decode])
    assert answered(sink)
    check_empty(router)


@routed(2, num_prefill=1)
async def test_both_engines_have_the_adapter_before_they_begin(router):
    prefill, decode = several(router, num_adapters=1)
    sinks = [add(router, [n] * 9, 6, adapter=adapter) for n, adapter in enumerate(["a", "", "b", "a"])]
    run([prefill, decode])
    assert all(map(answered, sinks))
    assert [each.engine.stats().adapters for each in (prefill, decode)] == [1, 1]
    assert computed(decode) == 4 * 5
    check_empty(router)


@pytest.mark.parametrize("place", [0, 1])
def test_an_adapter_that_one_of_them_cannot_have_ends_the_request_on_both(place):
    @routed(2, num_prefill=1)
    async def test(router):
        replicas = several(router, num_adapters=1)
        carrier = replicas[place].engine._adapters._carrier
        assert isinstance(carrier, FakeCarrier)
        carrier.bad.add("a")
        bad, good = add(router, range(9), 6, adapter="a"), add(router, range(9), 6, adapter="b")
        run(replicas)
        (error,) = bad.errors
        assert isinstance(error, RequestError)
        assert (str(error), error.code, error.status) == ("a is no adapter.", "adapter_invalid", 404)
        assert answered(good)
        check_empty(router)

    test()


def test_an_engine_without_a_porter_refuses_what_it_cannot_do():
    engine, _ = make_engine()
    request = make_request([1, 2])
    request.hands_over = True
    with pytest.raises(RequestError, match="neither hands requests over"):
        engine.add(request)
