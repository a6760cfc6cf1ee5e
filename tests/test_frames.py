"""Messages between processes: whole again however they were cut, and refused where they are none of ours."""

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from hex_llm import frames
from hex_llm.frames import Broken, Decoder, FrameProtocol, attach, encode, read_frames


class Ping(msgspec.Struct, tag=True, array_like=True, frozen=True):
    number: int
    text: str = ""


class Blob(msgspec.Struct, tag=True, array_like=True, frozen=True):
    data: bytes
    names: tuple[str, ...] = ()


class Tree(msgspec.Struct, tag=True, array_like=True, frozen=True):
    anything: Any


class Other(msgspec.Struct, tag=True, array_like=True):
    number: int


Message = Ping | Blob | Tree
MESSAGES = st.lists(
    st.builds(Ping, st.integers(-(2**63), 2**64 - 1), st.text(st.characters(exclude_categories=["Cs"])))
    | st.builds(Blob, st.binary(max_size=300), st.lists(st.text("abc"), max_size=3).map(tuple)),
    max_size=12,
)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4) + body


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """`data` cut at these places."""
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(places)]


def feed(decoder: Decoder[Message], chunks: Iterable[bytes]) -> list[Message]:
    return [message for chunk in chunks for message in decoder.feed(chunk)]


@given(MESSAGES, st.lists(st.integers(0, 2000), max_size=30))
def test_messages_come_out_as_they_went_in_however_their_bytes_are_cut(messages, cuts):
    data = b"".join(map(encode, messages))
    assert feed(Decoder(Message), pieces(data, cuts)) == messages


@given(MESSAGES)
@settings(max_examples=20)
def test_messages_come_out_when_their_bytes_come_one_by_one(messages):
    data = b"".join(map(encode, messages))
    assert feed(Decoder(Message), (data[i : i + 1] for i in range(len(data)))) == messages


@given(MESSAGES, st.integers(1, 400))
def test_a_message_is_not_there_before_its_last_byte(messages, missing):
    data = b"".join(map(encode, messages))
    end, whole = 0, []
    for message in messages:
        end += len(encode(message))
        if end <= len(data) - missing:
            whole.append(message)
    decoder = Decoder[Message](Message)
    assert feed(decoder, [data[: max(len(data) - missing, 0)]]) == whole
    assert feed(decoder, [data[max(len(data) - missing, 0) :]]) == messages[len(whole) :]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",  # no msgpack
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode(["Ping", "seven", ""]),
        msgspec.msgpack.encode(["Ping"]),
        msgspec.msgpack.encode({"type": "Ping", "number": 7}),
        msgspec.msgpack.encode(["Other", 7]),
        msgspec.msgpack.encode(Ping(7)) + b"\x00",
        msgspec.msgpack.encode(Ping(7))[:-1],
        msgspec.msgpack.encode(["Blob", b"", ["a", 1]]),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"anything")),
        msgspec.msgpack.encode(["Ping", 7, "?"]).replace(b"?", b"\xff"),  # no UTF-8
        msgspec.msgpack.encode(["Tree"]).replace(b"\x91", b"\x92") + b"\x91" * 100_000 + b"\x01",
    ],
    ids=lambda body: f"{body[:12]}",
)
def test_what_does_not_fit_the_schema_is_refused_and_what_came_before_is_not(body):
    decoder, came = Decoder[Message](Message), []
    with pytest.raises(Broken, match="does not fit its schema"):
        came += decoder.feed(encode(Ping(1)) + frame(body) + encode(Ping(2)))
    assert came == [Ping(1)]


def test_a_length_beyond_the_limit_is_refused_before_any_of_the_message_has_come():
    with pytest.raises(Broken, match=f"{frames.MAX_FRAME + 1} bytes is more than {frames.MAX_FRAME}"):
        feed(Decoder(Message), [(frames.MAX_FRAME + 1).to_bytes(4)])


def test_a_message_of_the_limit_is_sent_and_one_byte_more_is_not(monkeypatch):
    body = len(msgspec.msgpack.encode(Blob(b"x" * 1000)))
    monkeypatch.setattr(frames, "MAX_FRAME", body)
    assert feed(Decoder(Message), [encode(Blob(b"x" * 1000))]) == [Blob(b"x" * 1000)]
    with pytest.raises(Broken, match=f"{body + 1} bytes is more than {body}"):
        encode(Blob(b"x" * 1001))


def test_reading_takes_time_in_proportion_to_the_bytes():
    def seconds(data: bytes, chunk: int) -> float:
        best = float("inf")
        for _ in range(3):
            decoder, chunks = Decoder[Message](Message), [data[i : i + chunk] for i in range(0, len(data), chunk)]
            started = time.thread_time()
            feed(decoder, chunks)
            best = min(best, time.thread_time() - started)
        return best

    # 16 times the bytes: were it quadratic, 256 times the time.
    large = [encode(Blob(b"x" * size)) for size in (2**20, 2**24)]
    assert seconds(large[1], 2**12) < 160 * seconds(large[0], 2**12)
    many = [encode(Ping(7)) * count for count in (2**10, 2**14)]
    assert seconds(many[1], len(many[1])) < 160 * seconds(many[0], len(many[0]))


def test_a_blocking_socket_is_read_until_its_other_end_goes():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(encode(Ping(1)) + encode(Ping(2)) + encode(Ping(3))[:-1])
        theirs.close()
        assert list(read_frames(ours, Decoder[Message](Message))) == [Ping(1), Ping(2)]


def test_a_blocking_socket_that_is_reset_has_ended():
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(b"unread")
        theirs.close()  # with something unread: a reset
        assert list(read_frames(ours, Decoder[Message](Message))) == []


# A loop's end.


class End:
    """A FrameProtocol, and what it called."""

    def __init__(self, take: Callable[[Message], None] | None = None):
        self.taken: list[Message] = []
        self.num_lost = 0
        self.lost = asyncio.Event()
        self.protocol = FrameProtocol[Message](Message, take or self.taken.append, self._lose)

    def _lose(self) -> None:
        self.num_lost += 1
        self.lost.set()


LOOPS: Sequence = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def runner(request):
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


def test_a_loop_takes_messages_and_sends_its_own(runner):
    async def main():
        ours, theirs = socket.socketpair()
        with theirs:
            end = End()
            await attach(end.protocol, ours)
            theirs.sendall(encode(Ping(1)) + encode(Blob(b"two")))
            end.protocol.send(Ping(3))
            theirs.settimeout(5)
            received = await asyncio.to_thread(next, read_frames(theirs, Decoder[Message](Message)))
            assert received == Ping(3)
            assert end.taken == [Ping(1), Blob(b"two")]
            end.protocol.close()
            await asyncio.wait_for(end.lost.wait(), 5)
            end.protocol.send(Ping(4))  # to nobody
            assert await asyncio.to_thread(theirs.recv, 10) == b""
            assert end.num_lost == 1

    runner.run(main())


def test_a_large_message_goes_both_ways(runner):
    async def main():
        ours, theirs = socket.socketpair()
        with theirs:
            end, blob = End(), Blob(b"x" * 2**23)
            await attach(end.protocol, ours)

            def echo() -> None:
                for message in read_frames(theirs, Decoder[Message](Message)):
                    theirs.sendall(encode(message))

            thread = threading.Thread(target=echo)
            thread.start()
            end.protocol.send(blob)
            async with asyncio.timeout(10):
                while not end.taken:
                    await asyncio.sleep(0.01)
            assert end.taken == [blob]
            end.protocol.close()
            await asyncio.to_thread(thread.join)

    runner.run(main())


def test_what_is_none_of_ours_ends_the_connection_once_and_is_logged_in_one_line(runner, caplog):
    async def main():
        ours, theirs = socket.socketpair()
        with theirs:
            end = End()
            await attach(end.protocol, ours)
            theirs.sendall(encode(Ping(1)) + encode(Other(2)) + encode(Ping(3)))
            await asyncio.wait_for(end.lost.wait(), 5)
            assert end.taken == [Ping(1)]
            theirs.settimeout(5)
            assert await asyncio.to_thread(theirs.recv, 10) == b""
            await asyncio.sleep(0.01)
            assert end.num_lost == 1

    runner.run(main())
    (record,) = caplog.records
    assert "does not fit its schema" in record.getMessage()
    assert record.exc_info is None


def test_a_message_too_large_to_send_is_told_and_the_connection_goes_on(runner, monkeypatch):
    async def main():
        ours, theirs = socket.socketpair()
        with theirs:
            end = End()
            await attach(end.protocol, ours)
            monkeypatch.setattr(frames, "MAX_FRAME", 100)
            with pytest.raises(Broken):
                end.protocol.send(Blob(b"x" * 101))
            end.protocol.send(Ping(1))
            theirs.settimeout(5)
            assert await asyncio.to_thread(next, read_frames(theirs, Decoder[Message](Message))) == Ping(1)
            end.protocol.close()
            await asyncio.wait_for(end.lost.wait(), 5)

    runner.run(main())


def test_a_socket_that_cannot_be_attached_is_closed(runner):
    async def main():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
            with pytest.raises(ValueError, match=r"SOCK_STREAM|[Ss]tream"):
                await attach(End().protocol, ours)
            assert ours.fileno() == -1

    runner.run(main())
