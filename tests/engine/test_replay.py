"""What becomes of requests whose replica is lost, and of those that no replica can take."""

import asyncio

from hex_llm import frames
from hex_llm.engine.request import FinishReason
from hex_llm.engine.router import MAX_REPLAYS
from hex_llm.errors import EngineDead, TooLarge, Unavailable
from tests.engine.fake_carrier import source_of
from tests.engine.fake_replicas import FakeReplica, add, check_empty, connected, replica_of, routed
from tests.engine.fakes import alone, logprobs_alone


@routed(2)
async def test_requests_of_a_lost_replica_go_on_elsewhere_as_if_nothing_had_been(router):
    replicas = connected(router)
    sinks = [add(router, [n, 2, 3], 20, seed=n, logprobs=1, prompt_logprobs=1) for n in range(6)]
    sent = []
    router.on_send = lambda replica, again: sent.append((replica, again))
    for _ in range(5):
        for replica in replicas:
            replica.step()
    told = {id(sink): len(sink.tokens) for sink in sinks}
    assert min(told.values()) > 0
    replicas[0].die()
    replicas[1].drain()
    assert sent == [(1, True)] * 3
    for sink in sinks:
        request = sink.request
        assert sink.tokens == alone(request)
        assert sink.finish_reason == FinishReason.LENGTH
        assert len(sink.waited) == 1
        assert len({output.num_cached for output in sink.outputs}) == 1
        assert [output.prompt_logprobs is not None for output in sink.outputs] == [True] + [False] * 19
        of_output = logprobs_alone(request, [*request.prompt, *sink.tokens])[len(request.prompt) - 1 :]
        assert [output.logprobs[0].logprob for output in sink.outputs] == [each.logprob for each in of_output]
    moved = [message.request for message in replicas[1].added if message.waited is None]
    assert len(moved) == 3
    assert all(each.sampling.prompt_logprobs is None for each in moved)  # nobody computes them again
    check_empty(router)


@routed(2)
async def test_a_request_that_moves_takes_its_adapter_with_it(router):
    replicas = connected(router, num_adapters=1)
    sinks = [add(router, [n, 2, 3], 20, adapter="ab"[n % 2]) for n in range(4)]
    for _ in range(3):
        for replica in replicas:
            replica.step()
    replicas[0].die()
    replicas[1].drain()
    assert all(sink.tokens == alone(sink.request) for sink in sinks)
    moved = [message.request for message in replicas[1].added if message.waited is None]
    assert moved
    assert all(each.adapter_source == source_of(each.adapter) for each in moved)
    check_empty(router)


@routed(2)
async def test_what_a_client_is_told_of_cached_tokens_does_not_change_when_a_request_moves(router):
    replicas = connected(router)
    prompt = list(range(30))
    add(router, prompt, 1)
    replicas[0].drain()
    sink = add(router, prompt, 20)
    for _ in range(5):
        replicas[0].step()
    replicas[0].die()
    replicas[1].drain()
    assert {output.num_cached for output in sink.outputs} == {28}
    assert replicas[1].engine.stats().total_prefix_queries == 0  # it was counted where it began


@routed(2)
async def test_a_request_that_waited_when_its_replica_was_lost_waits_no_longer_for_that(router):
    replicas = connected(router, max_running=1)
    sinks = [add(router, [1, 2], 4) for _ in range(4)]
    for entry in router._entries.values():
        entry.arrival -= 10
    for replica in replicas:
        replica.step()
    replicas[0].die()
    replicas[1].drain()
    begun, waiting = [message.waited for message in replicas[1].added[2:]]
    assert begun is None
    assert waiting is not None
    assert 10 <= waiting < 11
    assert all(sink.tokens == alone(sink.request) for sink in sinks)


@routed(4)
async def test_a_request_is_replayed_twice_and_then_fails(router):
    replicas = connected(router)
    sink = add(router, [1, 2], 20)
    for number in range(MAX_REPLAYS + 1):
        assert not sink.errors
        place = replica_of(replicas, sink) if number < 3 else -1
        replicas[place].step()
        replicas[place].die()
        replicas[place] = FakeReplica()  # never joins
    (error,) = sink.errors
    assert isinstance(error, EngineDead)
    assert error.status == 500
    assert not router.lost.is_set()
    check_empty(router)


@routed(3)
async def test_what_two_replicas_died_of_does_not_get_to_the_last_one(router):
    replicas = connected(router)
    sink, innocent = add(router, [1, 2], 20), None
    for _ in range(MAX_REPLAYS):
        replicas[replica_of(replicas, sink)].die()
        replicas = [each if not each.dead else FakeReplica() for each in replicas]
    assert router.num_up == 1
    assert not any(each.added and each.client.ready for each in replicas)
    innocent = add(router, [3], 2)
    assert replica_of(replicas, innocent) == next(each.index for each in router.replicas if each.is_up)
    back = next(each for each in router.replicas if not each.is_up)
    router.join(back.index, replicas[back.index].client)
    assert not replicas[back.index].inbox
    replicas[back.index].get_ready()
    for replica in replicas:
        replica.drain()
    assert sink.tokens == alone(sink.request)
    check_empty(router)


@routed(3, queue_timeout=0.02)
async def test_what_no_replica_can_be_risked_for_fails_after_a_while(router):
    replicas = connected(router)
    sink = add(router, [1, 2], 20)
    for _ in range(MAX_REPLAYS):
        place = replica_of(replicas, sink)
        replicas[place].step()
        replicas[place].die()
        replicas = [each if not each.dead else FakeReplica() for each in replicas]
    await asyncio.sleep(0.05)
    (error,) = sink.errors
    assert isinstance(error, EngineDead)
    assert error.status == 500
    check_empty(router)


@routed(2)
async def test_requests_that_nobody_can_take_are_held_in_order_until_somebody_joins(router):
    replicas = connected(router, max_running=1)
    begun = add(router, [1, 2], 10)
    replicas[0].step()
    replicas[0].step()
    replicas[1].die()
    back = FakeReplica()
    router.join(1, back.client)
    replicas[0].die()  # one is left, and it is still starting
    assert not router.lost.is_set()
    late = [add(router, [n], 3) for n in range(3)]
    router.abort([late[1].request.id])
    assert back.inbox == []
    back.get_ready()
    back.listen()
    sent = [message.request.id.partition("~")[0] for message in back.added]
    assert sent == [sink.request.id for sink in (begun, late[0], late[2])]
    back.drain()
    assert begun.tokens == alone(begun.request)
    assert [sink.tokens == alone(sink.request) for sink in late] == [True, False, True]
    assert late[1].outputs == late[1].errors == []
    check_empty(router)


@routed(3)
async def test_what_was_held_is_sent_once_however_many_join(router):
    replicas = connected(router)
    for place in (0, 1):
        replicas[place].die()
        replicas[place] = FakeReplica()
        router.join(place, replicas[place].client)
    replicas[2].die()
    sinks = [add(router, [n], 4) for n in range(3)]
    for replica in replicas[:2]:
        replica.get_ready()
        replica.listen()
    assert [len(replica.added) for replica in replicas] == [3, 0, 0]
    replicas[0].drain()
    assert all(sink.tokens == alone(sink.request) for sink in sinks)
    check_empty(router)


@routed(2, queue_timeout=0.02)
async def test_a_request_is_not_held_for_longer_than_it_may_wait_unless_it_has_begun(router):
    replicas = connected(router)
    begun = add(router, [1, 2], 10)
    replicas[0].step()
    replicas[1].die()
    back = FakeReplica()
    router.join(1, back.client)
    replicas[0].die()
    waiting = add(router, [3], 3)
    await asyncio.sleep(0.05)
    (error,) = waiting.errors
    assert isinstance(error, Unavailable)
    assert error.code == "queue_timeout"
    assert not begun.errors
    back.get_ready()
    back.drain()
    assert begun.tokens == alone(begun.request)
    check_empty(router)


@routed(2)
async def test_what_is_held_fails_when_nobody_is_left(router):
    replicas = connected(router)
    replicas[1].die()
    back = FakeReplica()
    router.join(1, back.client)
    sinks = [add(router, [1], 3)]
    replicas[0].die()
    sinks.append(add(router, [2], 3))
    back.fail(4)
    assert router.lost.is_set()
    assert router.exit_code == 4  # as the last one says
    assert [[error.status for error in sink.errors] for sink in sinks] == [[500], [500]]
    check_empty(router)


@routed(2)
async def test_a_replica_that_is_dropped_is_not_heard_any_more(router):
    replicas = connected(router)
    sink = add(router, [1, 2], 10)
    replicas[0].step()
    replicas[0].step()
    dropped = replicas[0]
    router.drop(0)
    assert router.num_up == 1
    dropped.dead = False
    dropped.step()  # it goes on computing, and talking
    replicas[1].drain()
    assert sink.tokens == alone(sink.request)
    router.drop(0)  # is no error
    check_empty(router)


@routed(2)
async def test_a_replica_that_joins_again_before_its_old_connection_ended_replaces_it(router):
    replicas = connected(router)
    sink = add(router, [1, 2], 10)
    replicas[0].step()
    again = FakeReplica()
    router.join(0, again.client)
    assert replicas[0].client.lost
    replicas[1].drain()
    assert sink.tokens == alone(sink.request)
    again.get_ready()
    assert router.num_up == 2
    replicas[0].die()
    assert router.num_up == 2
    check_empty(router)


@routed(2)
async def test_the_last_replica_that_joins_again_before_its_old_connection_ended_is_no_end(router):
    replicas = connected(router)
    replicas[1].die()
    sink = add(router, [1, 2], 10)
    replicas[0].step()
    again = FakeReplica()
    router.join(0, again.client)
    assert not router.lost.is_set()
    again.get_ready()
    again.drain()
    assert sink.tokens == alone(sink.request)
    check_empty(router)


@routed(2)
async def test_sequences_of_a_group_wait_for_each_other_wherever_they_are(router):
    replicas = connected(router, max_running=1)
    ahead = [add(router, [1], 2), add(router, [1], 8)]
    group = [add(router, [n, 3, 4], 4, group="one") for n in range(4)]
    assert {replica_of(replicas, sink) for sink in group} == {0, 1}
    for _ in range(6):
        replicas[0].step()
    replicas[1].step()
    assert any(sink.waited for sink in group)
    replicas[1].expire()
    for _ in range(60):
        for replica in replicas:
            replica.step()
    assert all(sink.tokens == alone(sink.request) for sink in (*ahead, *group))
    check_empty(router)


@routed(2)
async def test_a_group_of_which_none_has_begun_is_given_up(router):
    replicas = connected(router, max_running=1)
    ahead = [add(router, [1], 8), add(router, [1], 8)]
    group = [add(router, [n, 3, 4], 4, group="one") for n in range(4)]
    for replica in replicas:
        replica.step()
        replica.expire()
    assert [[error.code for error in sink.errors] for sink in group] == [["queue_timeout"]] * 4
    for replica in replicas:
        replica.drain()
    assert all(sink.tokens == alone(sink.request) for sink in ahead)
    check_empty(router)


@routed(2)
async def test_a_request_that_has_grown_too_large_to_move_fails_alone(router):
    replicas = connected(router)
    sinks = [add(router, [1] * 30, 20), add(router, [2], 20)]
    moving = replicas[replica_of(replicas, sinks[0])]
    moving.step()
    before, frames.MAX_FRAME = frames.MAX_FRAME, 10
    try:
        moving.die()
    finally:
        frames.MAX_FRAME = before
    assert [type(error) for error in sinks[0].errors] == [TooLarge]
    assert not sinks[1].errors
    assert router.num_requests == 1
