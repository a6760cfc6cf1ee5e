"""Several engines as one: where requests go, and how all of them start and end."""

import random
from dataclasses import replace

import pytest

from hex_llm import frames
from hex_llm.engine.affinity import Belief
from hex_llm.engine.block_pool import extend_keys
from hex_llm.engine.output import Stats
from hex_llm.engine.wire import Alive, Starting
from hex_llm.errors import EngineDead, RequestError, ServerError, TooLarge
from tests.engine.fake_replicas import FakeReplica, add, check_empty, connected, replica_of, routed
from tests.engine.fakes import VOCAB, alone, make_request


@routed(2)
async def test_it_is_ready_when_all_replicas_have_been_and_knows_the_model_with_the_first(router):
    first, second = FakeReplica(num_blocks=40), FakeReplica(num_blocks=30)
    router.join(0, first.client)
    assert not router.found.done()
    first.get_ready()
    assert router.found.result().vocab_size == VOCAB
    assert not router.ready.done()
    second.say(Starting("weights", 0.5))
    router.join(1, second.client)
    assert router.progress == Starting("weights", 0.5)
    second.get_ready()
    assert router.ready.result().limits.num_blocks == 30  # what a request may ask for has room everywhere
    assert router.num_up == 2


@routed(2)
async def test_a_replica_that_spoke_before_it_joined_is_heard(router):
    for index in range(2):
        replica = FakeReplica()
        replica.get_ready()
        router.join(index, replica.client)
    assert router.ready.done()


@routed(1)
async def test_a_start_that_nobody_waits_for_any_more_is_no_error(router):
    router.found.cancel()
    router.ready.cancel()
    (replica,) = connected(router)
    sink = add(router, [1])
    replica.drain()
    assert sink.tokens == alone(sink.request)


@routed(2)
async def test_a_first_start_that_fails_ends_it_with_the_exit_code_of_that_start(router):
    first, second = FakeReplica(), FakeReplica()
    router.join(0, first.client)
    router.join(1, second.client)
    first.get_ready()
    second.fail(4)
    assert router.lost.is_set()
    assert router.exit_code == 4


@routed(2)
async def test_a_restart_that_fails_leaves_the_others_at_work(router):
    first, _ = connected(router)
    first.die()
    again = FakeReplica()
    router.join(0, again.client)
    again.fail(4)
    assert not router.lost.is_set()
    assert router.exit_code is None
    assert router.num_up == 1


@routed(1)
async def test_the_only_engine_may_say_why_it_cannot_go_on(router):
    (replica,) = connected(router)
    replica.fail(4)
    assert router.lost.is_set()
    assert router.exit_code == 4


@routed(1)
async def test_the_only_engine_that_goes_takes_all_requests_with_it(router):
    (replica,) = connected(router)
    sinks = [add(router, [1, 2, 3]) for _ in range(3)]
    replica.step()
    replica.die()
    assert router.lost.is_set()
    assert router.exit_code is None
    assert [[error.status for error in sink.errors] for sink in sinks] == [[500]] * 3
    with pytest.raises(EngineDead) as raised:
        add(router, [1])
    assert raised.value.status == 503
    check_empty(router)


@routed(2)
async def test_it_is_lost_when_no_replica_is_left(router):
    first, second = connected(router)
    first.die()
    assert not router.lost.is_set()
    second.die()
    assert router.lost.is_set()
    assert router.exit_code is None


@routed(3)
async def test_requests_go_where_the_fewest_tokens_are_outstanding(router):
    replicas = connected(router, prefix_caching=False)
    long = add(router, range(30), 20)
    short = add(router, range(3), 2)
    assert sorted(replica_of(replicas, sink) for sink in (long, short)) == [0, 1]
    third = add(router, range(10), 4)
    assert replica_of(replicas, third) == 2
    for _ in range(3):  # 30 + 20 outweigh all of these
        assert replica_of(replicas, add(router, range(3), 2)) != replica_of(replicas, long)
    for replica in replicas:
        replica.drain()
    check_empty(router)


@routed(2)
async def test_what_is_outstanding_goes_down_as_tokens_come(router):
    first, _ = connected(router)
    sink = add(router, range(30), 20)
    left = []
    while not sink.ended:
        first.step()
        left.append(router.replicas[0].num_outstanding)
    assert left[0] in (50, 19)
    assert left[-20:] == list(range(19, -1, -1))


@routed(2)
async def test_a_long_answer_counts_as_much_as_answers_had_of_late_until_it_must_be_shorter(router):
    first, second = connected(router)
    for _ in range(100):
        add(router, [1], 8)
        first.drain()
        second.drain()
    sink = add(router, [2], 40)
    there = router.replicas[replica_of([first, second], sink)]
    counted = []
    while not sink.ended:
        first.step()
        second.step()
        counted.append(there.num_outstanding)
    assert counted[-10:] == [8, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert set(counted[:-10]) <= {9, 8}


@routed(2)
async def test_a_request_goes_where_its_prefix_is_unless_that_replica_is_far_busier(router):
    replicas = connected(router, max_model_len=200, num_blocks=500, step_tokens=500)
    prefix = [random.Random(0).randrange(VOCAB) for _ in range(80)]
    add(router, [39], 4)
    first = add(router, [*prefix, 1], 4)
    assert replica_of(replicas, first) == 1
    for replica in replicas:
        replica.drain()
    busy = [add(router, [*prefix, n], 20) for n in range(2, 10)]
    assert {replica_of(replicas, sink) for sink in busy} == {1}
    others = [add(router, [*prefix, n % 40], 20) for n in range(100)]
    assert {replica_of(replicas, sink) for sink in others} == {0, 1}  # it has it too, as soon as one went there


@routed(2)
async def test_an_answer_that_is_complete_is_a_prefix_of_what_follows(router):
    replicas = connected(router)
    add(router, [9], 4)
    first = add(router, [1, 2, 3, 4, 5], 20, stop_after=18)
    assert replica_of(replicas, first) == 1
    for replica in replicas:
        replica.drain()
    follow_up = [1, 2, 3, 4, 5, *first.tokens, 7]
    keys = extend_keys(make_request(follow_up), 5, 4)
    assert router.replicas[1].belief.match(keys) == 5
    for _ in range(3):
        assert replica_of(replicas, add(router, follow_up, 4)) == 1


@routed(2)
async def test_a_prefix_that_is_still_being_computed_counts_as_there(router):
    replicas = connected(router, max_model_len=200, num_blocks=500)
    prompt = list(range(40))
    assert {replica_of(replicas, add(router, prompt, 4)) for _ in range(4)} == {0}
    assert replica_of(replicas, add(router, prompt[::-1], 4)) == 1


@routed(2)
async def test_prefixes_of_one_salt_are_nothing_to_another(router):
    replicas = connected(router, max_model_len=200, num_blocks=500)
    prompt = list(range(40))
    for salt, place in (("a", 0), ("b", 1), ("a", 0), ("b", 1)):
        sink = add(router, prompt, 1, cache_salt=salt)
        assert replica_of(replicas, sink) == place
        for replica in replicas:
            replica.drain()


@routed(2)
async def test_a_replica_that_comes_back_is_believed_to_have_nothing(router):
    replicas = connected(router)
    prompt = list(range(40))
    sink = add(router, prompt, 1)
    assert replica_of(replicas, sink) == 0
    replicas[0].drain()
    assert len(router.replicas[0].belief) > 0
    replicas[0].die()
    back = FakeReplica()
    router.join(0, back.client)
    assert not router.replicas[0].is_up
    back.get_ready()
    assert router.replicas[0].is_up
    assert len(router.replicas[0].belief) == 0


@routed(2)
async def test_the_keys_that_go_with_a_request_are_those_that_the_engine_would_make(router):
    first, _ = connected(router)
    add(router, range(30), 4, cache_salt="salt")
    first.listen()
    (message,) = first.added
    assert message.request.keys == extend_keys(replace(message.request, keys=[]), 7, 4)


def test_the_end_of_a_prefix_is_forgotten_first_and_the_oldest_prefix_before_others():
    belief = Belief(5)
    a, b = [b"a1", b"a2", b"a3"], [b"b1", b"b2", b"b3"]
    belief.enter(a)
    belief.enter(b)
    assert (len(belief), belief.match(a), belief.match(b)) == (5, 2, 3)
    belief.enter(a[:2])
    belief.enter([b"c1", b"c2"])
    assert (belief.match(a), belief.match(b), belief.match([b"c1", b"c2"])) == (2, 1, 2)


@routed(2)
async def test_an_aborted_request_leaves_nothing_and_its_replica_hears_of_it(router):
    replicas = connected(router)
    sinks = [add(router, [1, 2], 10) for _ in range(4)]
    for replica in replicas:
        replica.step()
    router.abort([*(sink.request.id for sink in sinks[:3]), "of nobody"])
    router.abort([sinks[0].request.id])
    for replica in replicas:
        replica.drain()
    assert [sink.ended for sink in sinks] == [False, False, False, True]
    check_empty(router)


@routed(2)
async def test_a_sink_that_raises_ends_alone(router):
    replicas = connected(router)
    last, middle, good = add(router, [1], 4, raise_after=4), add(router, [1], 4, raise_after=2), add(router, [1], 4)
    for replica in replicas:
        replica.drain()
    for sink in (last, middle):
        (error,) = sink.errors
        assert type(error) is ServerError
    assert good.tokens == alone(good.request)
    check_empty(router)


@routed(2)
async def test_a_sink_that_cannot_be_told_holds_up_no_other(router):
    replicas = connected(router)
    sinks = [add(router, [1], 4) for _ in range(4)]

    def raises(error) -> None:
        raise ZeroDivisionError

    for sink in sinks[:2]:
        sink.on_fail = raises
    for replica in replicas:
        replica.die()
    assert [len(sink.errors) for sink in sinks] == [1, 1, 1, 1]
    check_empty(router)


@routed(2)
async def test_a_request_too_large_to_send_is_refused_and_leaves_nothing(router):
    connected(router, max_model_len=5000, num_blocks=5000)
    before, frames.MAX_FRAME = frames.MAX_FRAME, 1000
    try:
        with pytest.raises(TooLarge):
            add(router, [1] * 2000, 4)
    finally:
        frames.MAX_FRAME = before
    check_empty(router)


@routed(2)
async def test_a_request_that_an_engine_refuses_fails_with_its_words(router):
    replicas = connected(router)
    sink = add(router, [VOCAB], 4)
    for replica in replicas:
        replica.drain()
    (error,) = sink.errors
    assert isinstance(error, RequestError)
    assert str(VOCAB) in str(error)
    check_empty(router)


@routed(2)
async def test_counts_are_sums_over_replicas_and_never_fall_when_one_is_lost(router):
    replicas = connected(router)
    assert router.stats is None
    assert router.late_compiles == 0
    sizes = {"running": 1, "waiting": 2, "blocks": 10, "blocks_used": 3, "blocks_cached": 4}
    totals = {"total_steps": 5, "total_preemptions": 6, "total_prefix_queries": 7, "total_prefix_hits": 8}
    for replica in replicas:
        replica.say(Alive(Stats(**sizes, **totals), 2, 1.5, 3))
    twice = Stats(**{name: 2 * value for name, value in (sizes | totals).items()})
    assert router.stats == twice
    replicas[0].die()
    assert router.stats == replace(twice, **sizes)
    assert (router.late_compiles, router.late_compile_seconds, router.invariant_violations) == (4, 3.0, 6)
    back = FakeReplica()
    router.join(0, back.client)
    back.say(Alive(Stats(**sizes, **totals), 2, 1.5, 3))
    assert router.stats == replace(twice, **{name: 3 * value for name, value in totals.items()})
    assert router.late_compiles == 6


@routed(2)
async def test_one_that_is_closed_moves_nothing_and_fails_what_is_left(router):
    connected(router)
    sinks = [add(router, [1], 4) for _ in range(4)]
    sent = []
    router.on_send = lambda replica, again: sent.append(replica)
    router.close()
    assert router.lost.is_set()
    assert sent == []
    assert [len(sink.errors) for sink in sinks] == [1] * 4
    check_empty(router)


@pytest.mark.parametrize("answers", ["short", "up to the limit"])
def test_a_thousand_random_requests_are_shared_evenly(answers):
    @routed(2)
    async def shared(router):
        rng = random.Random(answers)
        limits = {"max_model_len": 512, "num_blocks": 3000, "max_running": 16, "step_tokens": 256, "block_size": 16}
        replicas = connected(router, **limits)
        tokens, requests = [0, 0], [0, 0]
        sizes = {}

        def count(replica: int, again: bool) -> None:
            requests[replica] += 1
            tokens[replica] += sizes["now"]

        router.on_send = count
        head = [rng.randrange(VOCAB) for _ in range(16)]  # of the chat template, say
        for _ in range(1000):
            num_prompt, num_answer = int(rng.lognormvariate(3, 1)) % 200 + 1, rng.randrange(1, 40)
            longest = num_answer if answers != "short" else num_answer + rng.randrange(200)
            sizes["now"] = num_prompt + 16 + num_answer
            prompt = head + [rng.randrange(VOCAB) for _ in range(num_prompt)]
            add(router, prompt, longest, stop_after=num_answer)
            for replica in replicas:
                for _ in range(rng.randrange(4)):
                    replica.step()
        for replica in replicas:
            replica.drain()
        check_empty(router)
        assert max(tokens) <= 1.1 * sum(tokens) / 2, tokens
        assert max(requests) <= 1.1 * sum(requests) / 2, requests

    shared()
