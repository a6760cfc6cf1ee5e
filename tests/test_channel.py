"""Connections between processes: who may connect over a network, and what may be said there."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from hex_llm import channel as channel_module
from hex_llm.channel import Channel, address_of, call, greet, listen
from hex_llm.frames import Broken, Decoder, encode, read_frames
from hex_llm.seal import NONCE, TAG, Numbering, Seal, seals


class Word(msgspec.Struct, tag=True, array_like=True, frozen=True):
    text: str


KEY = b"the cluster's key"


def connect(address: str, key: bytes = KEY, other_key: bytes = KEY) -> tuple[Any, Any]:
    """What both ends make of it: a channel each, or what they raise."""
    with listen(address) as listener, ThreadPoolExecutor(2) as pool:
        calling = pool.submit(call, address_of(listener), key, timeout=5)
        greeting = pool.submit(lambda: greet(listener.accept()[0], other_key, timeout=5))
        return tuple(each.exception() or each.result() for each in (calling, greeting))  # pyright: ignore


@pytest.fixture(params=["unix", "tcp"])
def channels(request, tmp_path):
    both = connect(f"unix:{tmp_path}/door" if request.param == "unix" else "tcp:127.0.0.1:0")
    yield both
    for each in both:
        each.socket.close()


def test_messages_go_both_ways_in_their_order(channels):
    caller, callee = channels
    for sender, receiver in ((caller, callee), (callee, caller)):
        for text in ("one", "two", "x" * 100_000):
            sent = threading.Thread(target=sender.send, args=(Word(text),))
            sent.start()
            assert receiver.receive(Word) == Word(text)
            sent.join()


def test_what_comes_after_a_message_stays_for_the_next_reader(channels):
    caller, callee = channels
    for text in ("hello", "one", "two"):
        caller.send(Word(text))
    caller.socket.shutdown(socket.SHUT_WR)
    assert callee.receive(Word) == Word("hello")
    decoder = Decoder[Word](Word, callee.seals.incoming)
    assert list(read_frames(callee.socket, decoder)) == [Word("one"), Word("two")]


def test_the_end_of_a_connection_within_a_message_is_told(channels):
    caller, callee = channels
    caller.socket.sendall(encode(Word("hello"))[:-1])
    caller.socket.close()
    with pytest.raises(Broken, match="ended before all had come"):
        callee.receive(Word)


def test_only_a_network_needs_signatures(channels):
    signed = channels[0].socket.family != socket.AF_UNIX
    assert [isinstance(each.seals.outgoing, Seal) for each in channels] == [signed, signed]


def test_a_message_that_is_lost_is_missed_with_the_next(channels):
    caller, callee = channels
    caller.send(Word("one"))
    assert callee.receive(Word) == Word("one")
    encode(Word("two"), caller.seals.outgoing)  # which goes nowhere
    caller.send(Word("three"))
    with pytest.raises(Broken, match=r"one before it has been lost|is not signed"):
        callee.receive(Word)


@pytest.mark.parametrize(("key", "other"), [(KEY, b""), (b"", KEY), (KEY, KEY[:-1])])
def test_over_a_network_both_ends_must_have_the_same_key(key, other):
    for outcome in connect("tcp:127.0.0.1:0", key, other):
        assert isinstance(outcome, Broken)
    caller, callee = connect("tcp:127.0.0.1:0", b"", b"")
    assert isinstance(caller, Channel)
    assert isinstance(callee, Channel)


def test_who_merely_calls_gets_nothing_that_was_made_with_the_key():
    with listen("tcp:127.0.0.1:0") as listener, ThreadPoolExecutor(1) as pool:
        greeting = pool.submit(lambda: greet(listener.accept()[0], KEY, timeout=5))
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.sendall(bytes(NONCE) + bytes(TAG))
            stranger.settimeout(5)
            heard = b""
            while piece := stranger.recv(1000):
                heard += piece
        assert len(heard) == NONCE
        assert isinstance(greeting.exception(), Broken)


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n"])
def test_who_says_nothing_or_too_little_is_dropped_in_time(says):
    with listen("tcp:127.0.0.1:0") as listener, socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(says)
        accepted = listener.accept()[0]
        with pytest.raises(TimeoutError):
            greet(accepted, KEY, timeout=0.2)
        assert accepted.fileno() == -1


def test_who_says_it_byte_by_byte_is_dropped_in_time():
    with (
        listen("tcp:127.0.0.1:0") as listener,
        ThreadPoolExecutor(1) as pool,
        socket.create_connection(listener.getsockname()) as stranger,
    ):
        greeting = pool.submit(lambda: greet(listener.accept()[0], KEY, timeout=0.5))
        start = time.monotonic()
        while not greeting.done() and time.monotonic() - start < 20:
            stranger.sendall(b"a")
            time.sleep(0.2)
        assert isinstance(greeting.exception(), TimeoutError)
        assert time.monotonic() - start < 10


def test_nobody_answers_where_nobody_listens(tmp_path):
    with listen("tcp:127.0.0.1:0") as listener:
        address = address_of(listener)
    for gone in (address, f"unix:{tmp_path}/nothing"):
        with pytest.raises(OSError, match=r"refused|No such file"):
            call(gone, KEY, timeout=1)


def ends() -> tuple[Seal | Numbering, Seal | Numbering]:
    """The seal that signs, and the one that checks."""
    nonces = bytes(range(2 * NONCE))
    return seals(KEY, nonces, caller=True).outgoing, seals(KEY, nonces, caller=False).incoming


def frame_of(*texts: str) -> list[bytes]:
    signs, _ = ends()
    return [encode(Word(text), signs) for text in texts]


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("repeated", lambda one, two: [one, one]),
        ("left out", lambda one, two: [two]),
        ("in another order", lambda one, two: [two, one]),
        ("altered", lambda one, two: [one.replace(b"one", b"eno")]),
        ("without a signature", lambda one, two: [one[:4] + bytes(TAG) + one[4 + TAG :]]),
        ("the receiver's own", lambda one, two: [encode(Word("one"), seals(KEY, bytes(64), caller=False).outgoing)]),
        ("of another connection", lambda one, two: [encode(Word("one"), seals(KEY, bytes(64), caller=True).outgoing)]),
    ],
)
def test_a_message_is_refused_that_was(what, change: Callable[[bytes, bytes], list[bytes]]):
    _, checks = ends()
    decoder = Decoder[Word](Word, checks)
    data = b"".join(change(*frame_of("one", "two")))
    with pytest.raises(Broken, match="not signed"):
        list(decoder.feed(data))


def test_messages_as_they_were_sent_are_taken_however_they_are_cut():
    _, checks = ends()
    decoder = Decoder[Word](Word, checks)
    data = b"".join(frame_of("one", "two", "three"))
    came = [word for index in range(0, len(data), 7) for word in decoder.feed(data[index : index + 7])]
    assert came == [Word("one"), Word("two"), Word("three")]


def test_a_connection_to_another_machine_finds_out_when_that_is_gone():
    caller, callee = connect("tcp:127.0.0.1:0")
    for each in (caller, callee):
        connection = each.socket
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == channel_module._LOST_AFTER_S * 1000
        connection.close()
