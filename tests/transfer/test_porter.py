"""Porters in one process, over sockets of both kinds: what each engine is told, and that nothing stays behind."""

import os
import socket
import threading
import time
import weakref
from dataclasses import replace

import jax
import pytest

from hex_llm import channel
from hex_llm.engine.handover import PARTS_IN_FLIGHT, Came, Complete, Left, Lost, Room, Taken, Wanted
from hex_llm.transfer.paths import PROCESS
from hex_llm.transfer.words import Begin, Freed, Hello
from tests.transfer.parts import KEY, End, make_part, staging, wait_until


class Ends:
    """Makes as many as a test wants, and looks that nothing is left in the end."""

    def __init__(self, folder, kind, path):
        self._folder, self._kind, self.path = folder, kind, path
        self.made = []

    def __call__(self, like=None, **settings):
        address = "tcp:127.0.0.1:0" if self._kind == "tcp" else f"unix:{self._folder}/{len(self.made)}"
        self.made.append(End(address, like, path=self.path, **settings))
        return self.made[-1]


@pytest.fixture(params=["unix host", "tcp host", "unix auto"])
def ends(request, tmp_path):
    kind, path = request.param.split()
    ends = Ends(tmp_path, kind, path)
    yield ends
    for end in ends.made:
        end.porter.close()
    wait_until(lambda: all(end.num_held == 0 for end in ends.made))


def hand_over(source, target, request_id="one", parts=((0, 4), (4, 3))):
    """All of a request, from the asking to the acknowledgement."""
    target.porter.fetch(request_id, source.address, parts[0][0])
    assert source.next(Wanted) == Wanted(request_id, parts[0][0])
    for first, count in parts:
        source.send(request_id, first, count)
        came = target.next(Came)
        assert (came.part.request_id, came.part.first, came.part.count) == (request_id, first, count)
        assert came.num_bytes == count * 2 * 2 * 4 * 8 * 16 * 2
        target.take(came.part)
    source.porter.finish(request_id, 17, sum(parts[-1]))
    complete = target.next(Complete)
    assert (complete.request_id, complete.token) == (request_id, 17)
    assert 0 <= complete.exposed <= complete.seconds < 10
    target.porter.acknowledge(request_id)
    assert source.next(Taken) == Taken(request_id)
    wait_until(lambda: source.num_held == target.num_held == 0)


def fill_up(source, request_id):
    """Sends until for a while there has been no room, though nobody takes anything. Returns how many blocks."""
    first, tried = 0, 0
    while tried < 20:
        tried += 1
        if source.porter.has_room():
            source.send(request_id, first, 4)
            first, tried = first + 4, 0
        time.sleep(0.005)
    return first


@jax.jit
def after_work(pages, times):
    """The same, from a program that takes a while for each time."""
    square = jax.lax.fori_loop(0, times, lambda _, held: jax.numpy.tanh(held @ held), jax.numpy.ones((256, 256)))
    return pages + (0 * square.sum()).astype(pages.dtype)


def computed_late(pages, seconds):
    """The same, from a program that takes about so long."""
    after_work(pages, 1).block_until_ready()
    started = time.monotonic()
    after_work(pages, 50).block_until_ready()
    return after_work(pages, int(50 * seconds / (time.monotonic() - started)) + 1)


def test_a_request_is_handed_over_part_by_part(ends):
    hand_over(ends(), ends())


def test_the_same_request_can_be_handed_over_again_and_in_both_directions(ends):
    one, two = ends(), ends()
    for source, target in ((one, two), (one, two), (two, one), (one, two)):
        hand_over(source, target)


def test_blocks_that_are_already_there_are_not_sent(ends):
    source, target = ends(), ends()
    hand_over(source, target, parts=((5, 8), (13, 1)))
    target.porter.fetch("all", source.address, 9)
    assert source.next(Wanted) == Wanted("all", 9)
    source.porter.finish("all", 3, 9)
    assert target.next(Complete).token == 3
    target.porter.acknowledge("all")
    assert source.next(Taken)


def test_who_takes_nothing_holds_up_the_source_and_who_takes_something_has_it_go_on(ends):
    source, target = ends(), ends()
    target.porter.fetch("long", source.address, 0)
    source.next(Wanted)
    end = fill_up(source, "long")
    waiting = [target.next(Came).part for _ in range(PARTS_IN_FLIGHT)]
    # As many have come as may, as many stand in slots, and as many have been copied out.
    assert end <= 4 * (3 * PARTS_IN_FLIGHT + 1)
    assert not source.porter.has_room()
    assert target.says_nothing()
    while not source.told.empty():
        assert source.next() == Room()
    while waiting:
        target.take(waiting.pop(0))
    assert source.next(Room) == Room()
    source.porter.finish("long", 1, end)
    while not isinstance(word := target.next(), Complete):
        target.take(word.part)
    target.porter.acknowledge("long")


def test_one_that_takes_nothing_does_not_hold_up_another(ends):
    source, slow, quick = ends(), ends(), ends()
    slow.porter.fetch("slow", source.address, 0)
    source.next(Wanted)
    quick.porter.fetch("quick", source.address, 0)
    source.next(Wanted)
    first = 0
    for _ in range(100):
        if source.porter.has_room("slow"):
            source.send("slow", first, 4)
            first += 4
        time.sleep(0.002)
    assert not source.porter.has_room("slow")
    assert source.porter.has_room("quick")
    source.send("quick", 0, 4)
    source.porter.finish("quick", 1, 4)
    quick.take(quick.next(Came).part)
    assert quick.next(Complete)
    quick.porter.acknowledge("quick")
    slow.porter.cancel("slow")


def test_a_step_that_takes_longer_than_silence_may_is_waited_for(ends):
    source, target = ends(silence=1.0), ends(silence=1.0)
    target.porter.fetch("one", source.address, 0)
    source.next(Wanted)
    part = make_part(source.staging, "one", 0, 4)
    late = replace(part, pages=computed_late(part.pages, seconds=3.0))
    assert not late.pages.is_ready()
    source.porter.send(late)
    source.porter.finish("one", 1, 4)
    target.take(target.next(Came).part)
    assert target.next(Complete).seconds < 2  # what is waited for is not carried
    target.porter.acknowledge("one")
    assert source.next(Taken)


def test_one_that_takes_nothing_for_long_is_dropped(ends):
    source, slow = ends(silence=0.5), ends(silence=3.0)  # which beats ten times a second
    slow.porter.fetch("slow", source.address, 0)
    source.next(Wanted)
    fill_up(source, "slow")
    while isinstance(word := source.next(), Room):
        pass
    assert word == Left("slow")
    wait_until(lambda: source.num_held == 0)
    while isinstance(word := slow.next(), Came):
        pass
    assert isinstance(word, Lost)
    assert "cannot be fetched from" in word.reason


@pytest.mark.parametrize("sent", [0, 1, 12])
def test_a_fetch_can_be_cancelled_at_any_time(ends, sent):
    source, target = ends(), ends()
    target.porter.fetch("one", source.address, 0)
    source.next(Wanted)
    for number in range(sent):
        source.send("one", 4 * number, 4)
    if sent:
        target.next(Came)
    target.porter.cancel("one")
    while isinstance(word := source.next(), Room):
        pass
    assert word == Left("one")
    while not target.told.empty():
        assert isinstance(target.next(), Came)  # told before it was cancelled
    source.send("one", 4 * sent, 4)
    source.porter.finish("one", 1, 4 * sent + 4)
    assert target.says_nothing()
    wait_until(lambda: source.num_held == target.num_held == 0)
    hand_over(source, target)


def test_the_source_can_refuse_and_cancel(ends):
    source, target = ends(), ends()
    for act, reason in ((source.porter.cancel, "it was cancelled"), (source.porter.refuse, "no such request")):
        target.porter.fetch("one", source.address, 0)
        source.next(Wanted)
        source.send("one", 0, 4)
        assert target.next(Came)
        act(*("one", reason)[: 1 if act == source.porter.cancel else 2])
        assert target.next(Lost) == Lost("one", reason)
        wait_until(lambda: source.num_held == target.num_held == 0)
        assert source.says_nothing()
    hand_over(source, target)


def test_what_waits_of_a_request_that_is_cancelled_makes_room_at_once(ends):
    source, slow = ends(), ends()
    slow.porter.fetch("one", source.address, 0)
    source.next(Wanted)
    fill_up(source, "one")
    source.porter.cancel("one")
    # Within a process, parts that were offered are the other engine's to take or leave.
    assert source.porter.has_room() or ends.path == "auto"
    while isinstance(word := slow.next(), Came):
        slow.take(word.part)
    assert isinstance(word, Lost)
    wait_until(source.porter.has_room)


def test_blocks_that_come_out_of_order_are_not_used(ends):
    source, target = ends(), ends()
    target.porter.fetch("one", source.address, 0)
    source.next(Wanted)
    source.porter._giving._given["one"].next = 4
    source.send("one", 4, 4)
    assert "block 4 came, and block 0 was to come" in target.next(Lost).reason
    assert source.next() == Left("one")


def test_when_a_second_engine_asks_the_first_is_turned_away(ends):
    source, first, second = ends(), ends(), ends()
    first.porter.fetch("one", source.address, 0)
    source.next(Wanted)
    source.send("one", 0, 4)
    assert first.next(Came)
    second.porter.fetch("one", source.address, 2)
    assert first.next(Lost) == Lost("one", "another engine asks for it")
    assert [source.next(), source.next()] == [Left("one"), Wanted("one", 2)]
    source.send("one", 2, 4)
    source.porter.finish("one", 1, 6)
    second.take(second.next(Came).part)
    assert second.next(Complete)
    second.porter.acknowledge("one")


@pytest.mark.parametrize("lost", [False, True])
def test_an_engine_that_does_not_know_yet_who_asks_now_completes_nothing_for_it(ends, lost):
    source, first, second = ends(), ends(), ends()
    first.porter.fetch("one", source.address, 0)
    source.next(Wanted)
    source.send("one", 0, 4)
    source.send("one", 4, 4)
    if lost:
        first.porter.close()
        assert source.next(Left)
    second.porter.fetch("one", source.address, 0)
    assert isinstance(source.next(), Wanted if lost else Left)
    # The engine has not read that, and goes on for the first.
    source.send("one", 8, 2)
    source.porter.finish("one", 1, 10)
    assert second.says_nothing()
    # Now it has.
    for start, count in ((0, 8), (8, 2)):
        source.send("one", start, count)
        second.take(second.next(Came).part)
    source.porter.finish("one", 1, 10)
    assert second.next(Complete)
    second.porter.acknowledge("one")


def test_an_engine_that_goes_is_told_on_either_side(ends):
    source, target = ends(), ends()
    for request_id in ("one", "two"):
        target.porter.fetch(request_id, source.address, 0)
        source.next(Wanted)
    source.send("one", 0, 4)
    target.next(Came)
    target.porter.close()
    assert {source.next(Left), source.next(Left)} == {Left("one"), Left("two")}
    lost = [target.next(Lost), target.next(Lost)]
    assert {each.request_id for each in lost} == {"one", "two"}
    # It may come back.
    again = ends()
    hand_over(source, again)


def test_a_source_that_is_restarted_at_the_same_address_is_connected_to_again(ends, tmp_path):
    address, target = f"unix:{tmp_path}/same", ends()
    for _ in range(2):
        source = End(address)
        ends.made.append(source)
        hand_over(source, target)
        target.porter.fetch("two", source.address, 0)
        source.next(Wanted)
        source.porter.close()
        assert target.next(Lost).request_id == "two"
        wait_until(lambda: address not in target.porter._fetching._sources)


def test_what_has_come_stays_when_the_source_goes(ends):
    source, target = ends(), ends()
    target.porter.fetch("one", source.address, 0)
    source.next(Wanted)
    source.send("one", 0, 4)
    source.porter.finish("one", 1, 4)
    came = target.next(Came)
    assert target.next(Complete)
    source.porter.close()
    assert source.next(Left)
    assert target.says_nothing()
    target.take(came.part)
    target.porter.acknowledge("one")


def test_nobody_at_the_address_is_told(ends, tmp_path):
    target = ends()
    for address in (f"unix:{tmp_path}/nobody", "tcp:127.0.0.1:1"):
        target.porter.fetch("one", address, 0)
        assert address in target.next(Lost).reason


def test_of_a_request_of_which_nothing_comes_the_rest_is_given_up(ends):
    source, target = ends(), ends(silence=3.0, patience=0.3)
    target.porter.fetch("one", source.address, 0)
    source.next(Wanted)
    source.send("one", 0, 4)
    target.take(target.next(Came).part)
    assert "0.3 s" in target.next(Lost).reason
    assert source.next(Left) == Left("one")


def test_engines_of_different_models_do_not_mix(ends):
    source, target = ends(), ends(staging(block=(3, 2, 4, 8, 16)))
    target.porter.fetch("one", source.address, 0)
    assert "its blocks look like" in target.next(Lost).reason
    assert source.says_nothing()


def test_staged_copies_are_dropped_as_soon_as_they_are_on_their_way(ends):
    source, target = ends(), ends()
    target.porter.fetch("one", source.address, 0)
    source.next(Wanted)
    parts = [make_part(source.staging, "one", 4 * number, 4) for number in range(3)]
    held = [weakref.ref(part.pages) for part in parts]
    while parts:
        source.porter.send(parts.pop(0))
    came = [target.next(Came).part for _ in held]
    # Between engines with the same device in one process, what comes is what was sent.
    same = came[0].pages is held[0]()
    wait_until(lambda: same or all(ref() is None for ref in held))
    held = [weakref.ref(part.pages) for part in came]
    while came:
        target.take(came.pop(0))
    wait_until(lambda: all(ref() is None for ref in held))
    # To a request that nobody asks for, nothing is kept at all.
    part = make_part(source.staging, "other", 0, 4)
    held = weakref.ref(part.pages)
    source.porter.send(part)
    del part
    assert held() is None
    target.porter.cancel("one")
    assert source.next(Left)


def test_a_slot_is_not_written_again_while_what_came_in_it_is_read(ends):
    source, target = ends(), ends()
    target.porter.fetch("long", source.address, 0)
    source.next(Wanted)
    kept = []
    for number in range(3 * PARTS_IN_FLIGHT):
        source.send("long", 8 * number, 8)  # as large as parts get, so that nothing is filled up
        part = target.next(Came).part
        target.porter.took(part)
        kept.append(part)
        if len(kept) == PARTS_IN_FLIGHT:
            for part in kept:
                target.take(part)
            kept.clear()
            del part
    target.porter.cancel("long")


def test_whoever_has_another_key_gets_nothing():
    source = End("tcp:127.0.0.1:0")
    target = End("tcp:127.0.0.1:0", key=b"another")
    target.porter.fetch("one", source.address, 0)
    assert source.address in target.next(Lost).reason
    assert source.says_nothing()
    for end in (source, target):
        end.porter.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_garbage_ends_its_own_connection_only(kind, tmp_path):
    ends = Ends(tmp_path, kind, "host")
    source, target = ends(), ends()
    family, place = channel._place(source.address)
    for garbage in (b"", b"\0\0\0\1\xc1", os.urandom(5000)):
        with socket.socket(family) as connection:
            connection.connect(place)
            connection.sendall(garbage)
    hello = Hello(source.porter._giving._hello.layout, PROCESS, "cpu", 1, "", "")
    for words in ((Freed(0),), (hello, Begin("by foot", False)), (hello, Begin("device", False), Freed(0))):
        found = channel.call(source.address, KEY)
        for word in words:
            found.send(word)
        found.socket.settimeout(5)
        while found.socket.recv(2**16):
            pass
        found.socket.close()
    wait_until(lambda: not source.porter._giving._askers)
    hand_over(source, target)
    for end in (source, target):
        end.porter.close()


def test_bytes_that_were_changed_on_the_way_are_refused():
    """Somebody in between who cannot sign: the connection ends, and what came is not used."""
    source, target = End("tcp:127.0.0.1:0"), End("tcp:127.0.0.1:0", path="host")
    between = socket.create_server(("127.0.0.1", 0))
    family, place = channel._place(source.address)

    def carry(here, there, spoils):
        passed = 0
        while data := bytearray(here.recv(2**16)):
            if spoils and passed + len(data) > 2000:
                data[-1] ^= 1
            passed += len(data)
            there.sendall(data)
        there.shutdown(socket.SHUT_WR)

    def stand_between():
        caller, _ = between.accept()
        with socket.socket(family) as callee, caller:
            callee.connect(place)
            back = threading.Thread(target=carry, args=(caller, callee, False), daemon=True)
            back.start()
            carry(callee, caller, True)

    threading.Thread(target=stand_between, daemon=True).start()
    target.porter.fetch("one", f"tcp:127.0.0.1:{between.getsockname()[1]}", 0)
    source.next(Wanted)
    source.send("one", 0, 8)
    assert "not signed" in target.next(Lost).reason
    for end in (source, target):
        end.porter.close()
