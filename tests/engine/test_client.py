"""An HTTP process's end of the connection to the engine, against a peer that says what a test wants it to."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from hex_llm import frames
from hex_llm.channel import Channel
from hex_llm.engine import client as client_module
from hex_llm.engine.client import EngineClient
from hex_llm.engine.output import Output, Stats
from hex_llm.engine.request import FinishReason
from hex_llm.engine.wire import Abort, Add, Alive, Failed, Found, Ready, Refused, Starting, Stepped, ToEngine
from hex_llm.errors import EngineDead, HexError, RequestError, ServerError, TooLarge, Unavailable
from hex_llm.frames import Decoder, encode
from tests.engine.fakes import make_limits, make_request

STATS = Stats(1, 2, 3, 4, 5, 6, 7, 8, 9)
READY = Ready(make_limits(), "float32", "a device")


class Sink:
    """Keeps what it is told; raises where a test wants it to."""

    def __init__(self, raises: str = ""):
        self.waited: list[float] = []
        self.outputs: list[Output] = []
        self.errors: list[HexError] = []
        self.raises = raises

    def begin(self, waited: float) -> None:
        self.waited.append(waited)
        self._may_raise("begin")

    def take(self, output: Output) -> None:
        self.outputs.append(output)
        self._may_raise("take")

    def fail(self, error: HexError) -> None:
        self.errors.append(error)
        self._may_raise("fail")

    def _may_raise(self, where: str) -> None:
        if where in self.raises:
            raise ZeroDivisionError(where)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.tokens]


class Peer:
    """The engine's end."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._seals = Channel(connection).seals
        self._decoder = Decoder[ToEngine](ToEngine, self._seals.incoming)
        connection.setblocking(False)

    async def say(self, *messages: msgspec.Struct) -> None:
        """Sends messages, and waits until they have been taken."""
        data = b"".join(encode(each, self._seals.outgoing) for each in messages)
        await asyncio.get_running_loop().sock_sendall(self._connection, data)
        for _ in range(5):
            await asyncio.sleep(0)

    async def hear(self) -> list[ToEngine]:
        """All that has been said to it."""
        await asyncio.sleep(0)
        try:
            return list(self._decoder.feed(self._connection.recv(2**20)))
        except BlockingIOError:
            return []

    async def leave(self) -> None:
        self._connection.close()
        for _ in range(5):
            await asyncio.sleep(0)


def talk(main: Callable[[EngineClient, Peer], Awaitable[None]]) -> None:
    """Runs `main` with a client and the peer it is connected to."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            client = EngineClient()
            await client.connect(Channel(ours))
            await main(client, Peer(theirs))
            client.close()
            await loses(client)

    asyncio.run(run())


async def loses(client: EngineClient) -> None:
    async with asyncio.timeout(5):
        while not client.lost:
            await asyncio.sleep(0)


def output(request_id: str, token: int, reason: FinishReason | None = None) -> Output:
    return Output(request_id, (token,), None, reason)


def test_each_output_goes_to_the_sink_of_its_request_until_its_last():
    async def main(client: EngineClient, peer: Peer) -> None:
        steps = []
        client.on_step = lambda outputs: steps.append(len(outputs))
        a, b = Sink(), Sink()
        client.add(make_request([1, 2], id="a"), a, "both")
        client.add(make_request([3], id="b"), b, waited=None)
        assert client.num_requests == 2
        first, second = await peer.hear()
        assert isinstance(first, Add)
        assert isinstance(second, Add)
        assert (first.request.id, first.request.prompt, first.group) == ("a", [1, 2], "both")
        assert (second.request.id, second.group) == ("b", "b")
        assert (first.waited, second.waited) == (0, None)
        await peer.say(Stepped([], [("a", 0.25), ("b", 0.5)]))
        await peer.say(Stepped([output("b", 5), output("a", 6)], []))
        await peer.say(Stepped([output("a", 7, FinishReason.LENGTH), output("b", 8)], []))
        assert (a.waited, b.waited) == ([0.25], [0.5])
        assert (a.tokens, b.tokens) == ([6, 7], [5, 8])
        assert (a.errors, b.errors) == ([], [])
        assert client.num_requests == 1
        assert steps == [2, 2]  # and none for a step that only began requests

    talk(main)


def test_all_of_an_output_comes_through():
    async def main(client: EngineClient, peer: Peer) -> None:
        sink, top = Sink(), (-1.5, 2, ((7, -0.5), (8, -1.5)))
        client.add(make_request([1], id="a"), sink)
        sent = Output("a", (5, 6), (top, top), FinishReason.STOP, 16, 2, (None, top))  # type: ignore[arg-type]
        await peer.say(Stepped([sent], []))
        assert sink.outputs == [sent]
        assert sink.outputs[0].prompt_logprobs[1].top[0] == (7, -0.5)
        assert sink.outputs[0].finish_reason is FinishReason.STOP

    talk(main)


def test_a_request_that_is_refused_fails_once_with_the_engines_words():
    async def main(client: EngineClient, peer: Peer) -> None:
        sink, late = Sink(), Sink()
        client.add(make_request([1], id="a"), sink)
        client.add(make_request([1], id="b"), late)
        await peer.say(
            Refused("a", "No.", "prompt", "context_length_exceeded", expired=False),
            Refused("b", "Too late.", None, "queue_timeout", expired=True),
            Refused("a", "No again.", None, None, expired=False),
            Refused("of nobody", "No.", None, None, expired=False),
            Stepped([output("a", 1)], [("a", 0.0)]),
        )
        (error,), (expired,) = sink.errors, late.errors
        assert isinstance(error, RequestError)
        assert (str(error), error.param, error.code) == ("No.", "prompt", "context_length_exceeded")
        assert isinstance(expired, Unavailable)
        assert (str(expired), expired.code, expired.status) == ("Too late.", "queue_timeout", 503)
        assert (sink.outputs, sink.waited, client.num_requests) == ([], [], 0)

    talk(main)


def test_a_refusal_that_brings_a_status_has_it():
    async def main(client: EngineClient, peer: Peer) -> None:
        ours, theirs = Sink(), Sink()
        client.add(make_request([1], id="a"), theirs)
        client.add(make_request([1], id="b"), ours)
        await peer.say(
            Refused("a", "It is not there.", None, "adapter_not_found", expired=False, status=404),
            Refused("b", "The disk is full.", None, "no_space", expired=False, status=507),
        )
        (error,), (fault,) = theirs.errors, ours.errors
        assert isinstance(error, RequestError)
        assert isinstance(fault, ServerError)
        assert (str(error), error.code, error.status) == ("It is not there.", "adapter_not_found", 404)
        assert (str(fault), fault.code, fault.status) == ("The disk is full.", "no_space", 507)

    talk(main)


def test_when_the_engine_goes_every_request_fails_once_and_no_other_is_taken():
    async def main(client: EngineClient, peer: Peer) -> None:
        sinks = [Sink(), Sink("fail"), Sink()]
        done = Sink()
        for index, sink in enumerate([*sinks, done]):
            client.add(make_request([1], id=str(index)), sink)
        await peer.say(Stepped([output("3", 1, FinishReason.LENGTH)], []))
        await peer.leave()
        await loses(client)
        for sink in sinks:
            (error,) = sink.errors
            assert isinstance(error, EngineDead)
            assert error.status == 500
        assert done.errors == []
        assert client.num_requests == 0
        with pytest.raises(EngineDead) as raised:
            client.add(make_request([1], id="4"), Sink())
        assert raised.value.status == 503
        client.abort(["0", "4"])  # is no error
        assert client.num_requests == 0
        client.close()
        assert [len(sink.errors) for sink in sinks] == [1, 1, 1]

    talk(main)


def test_a_message_that_is_none_of_the_engines_loses_the_engine():
    async def main(client: EngineClient, peer: Peer) -> None:
        sink = Sink()
        client.add(make_request([1], id="a"), sink)
        await peer.say(Abort(["a"], FinishReason.ABORT))
        await loses(client)
        assert len(sink.errors) == 1

    talk(main)


def test_an_aborted_request_hears_no_more_and_the_engine_hears_of_it_once():
    async def main(client: EngineClient, peer: Peer) -> None:
        sink, other = Sink(), Sink()
        client.add(make_request([1], id="a"), sink)
        client.add(make_request([1], id="b"), other)
        await peer.hear()
        client.abort(["a", "of nobody"], FinishReason.STOP)
        client.abort(["a"])
        assert await peer.hear() == [Abort(["a"], FinishReason.STOP)]
        # What was on its way.
        await peer.say(
            Stepped([output("a", 1), output("b", 2)], [("a", 1.0)]),
            Stepped([output("a", 3, FinishReason.LENGTH)], []),
            Refused("a", "Too late.", None, "queue_timeout", expired=True),
        )
        assert (sink.waited, sink.outputs, sink.errors) == ([], [], [])
        assert other.tokens == [2]
        assert client.num_requests == 1

    talk(main)


def test_a_sink_may_abort_its_own_request_in_the_middle_of_a_step():
    async def main(client: EngineClient, peer: Peer) -> None:
        class Stopping(Sink):
            def take(self, output: Output) -> None:
                super().take(output)
                client.abort(["a"], FinishReason.STOP)

        sink, other = Stopping(), Sink()
        client.add(make_request([1], id="a"), sink)
        client.add(make_request([1], id="b"), other)
        await peer.hear()
        await peer.say(Stepped([output("a", 1), output("b", 2)], []), Stepped([output("a", 3), output("b", 4)], []))
        assert (sink.tokens, other.tokens) == ([1], [2, 4])
        assert await peer.hear() == [Abort(["a"], FinishReason.STOP)]

    talk(main)


@pytest.mark.parametrize("raises", ["begin", "take", "take fail"])
def test_a_sink_that_raises_ends_alone(raises, caplog):
    async def main(client: EngineClient, peer: Peer) -> None:
        sink, other = Sink(raises), Sink()
        client.add(make_request([1], id="a"), sink)
        client.add(make_request([1], id="b"), other)
        await peer.hear()
        await peer.say(Stepped([output("a", 1), output("b", 2)], [("a", 0.0), ("b", 0.0)]))
        await peer.say(Stepped([output("a", 3, FinishReason.LENGTH), output("b", 4)], []))
        (error,) = sink.errors
        assert type(error) is ServerError
        assert "ZeroDivision" not in str(error)
        assert sink.tokens == ([] if raises == "begin" else [1])
        assert (other.waited, other.tokens, other.errors) == ([0.0], [2, 4], [])
        assert await peer.hear() == [Abort(["a"], FinishReason.ABORT)]
        assert client.num_requests == 1
        assert not client.lost

    talk(main)
    assert "The output of request a could not be taken in." in [each.getMessage() for each in caplog.records]


def test_a_sink_that_raises_at_its_last_output_is_not_aborted():
    async def main(client: EngineClient, peer: Peer) -> None:
        sink = Sink("take")
        client.add(make_request([1], id="a"), sink)
        await peer.hear()
        await peer.say(Stepped([output("a", 1, FinishReason.LENGTH)], []))
        assert len(sink.errors) == 1
        assert await peer.hear() == []  # the engine has ended it

    talk(main)


def test_the_start_can_be_followed():
    async def main(client: EngineClient, peer: Peer) -> None:
        changes = []
        client.on_change = lambda: changes.append((client.found, client.ready, client.lost))
        assert client.silence()[1]
        await peer.say(Starting("weights", 0.5))
        assert client.progress == Starting("weights", 0.5)
        assert client.found is None
        await peer.say(Found(2048, 100))
        assert client.found == Found(2048, 100)
        await peer.say(Starting("compiling", 1.0))
        assert client.silence()[1]
        await peer.say(READY)
        assert client.ready == READY
        assert not client.silence()[1]
        await peer.say(Starting("compiling", 0.0))
        assert client.silence()[1]
        await peer.say(Starting("compiling", 1.0))
        assert not client.silence()[1]
        await peer.leave()
        await loses(client)
        found = Found(2048, 100)
        assert changes == [(found, None, False), (found, READY, False), (found, READY, True)]

    talk(main)


def test_an_engine_that_is_given_up_is_lost_at_once_and_not_heard_any_more():
    async def main(client: EngineClient, peer: Peer) -> None:
        changes, sink = [], Sink()
        client.on_change = lambda: changes.append(len(sink.errors))
        client.add(make_request([1], id="a"), sink)
        client.give_up()
        assert (client.lost, len(sink.errors)) == (True, 1)
        await peer.say(READY, Stepped([output("a", 1)], []))
        await peer.leave()
        assert (client.ready, sink.outputs, len(sink.errors)) == (None, [], 1)
        assert changes == [0]  # once, and before the request failed

    talk(main)


def test_an_engine_that_is_ignored_is_not_heard_and_not_yet_lost():
    async def main(client: EngineClient, peer: Peer) -> None:
        sink = Sink()
        client.add(make_request([1], id="a"), sink)
        client.ignore()
        await peer.say(READY, Stepped([output("a", 1)], []))
        assert (client.ready, client.lost, sink.outputs, sink.errors) == (None, False, [], [])
        await peer.leave()
        await loses(client)
        assert len(sink.errors) == 1

    talk(main)


def test_a_start_that_fails_leaves_its_exit_code():
    async def main(client: EngineClient, peer: Peer) -> None:
        await peer.say(Failed(3))
        await peer.leave()
        await loses(client)
        assert client.exit_code == 3
        assert client.ready is None

    talk(main)


def test_signs_of_life_are_kept():
    async def main(client: EngineClient, peer: Peer) -> None:
        assert client.alive is None
        await peer.say(Alive(STATS, 2, 3.5, 4))
        assert client.alive == Alive(STATS, 2, 3.5, 4)
        await peer.say(Alive(replace(STATS, running=0), 2, 3.5, 4))
        assert client.alive.stats.running == 0

    talk(main)


def test_any_message_breaks_the_silence(monkeypatch):
    async def main(client: EngineClient, peer: Peer) -> None:
        now = time.monotonic() + 100
        monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now))
        assert client.silence()[0] >= 99
        await peer.say(Stepped([], []))
        assert client.silence()[0] == 0

    talk(main)


def test_a_request_too_large_to_send_is_refused_and_leaves_nothing(monkeypatch):
    async def main(client: EngineClient, peer: Peer) -> None:
        monkeypatch.setattr(frames, "MAX_FRAME", 1000)
        with pytest.raises(TooLarge):
            client.add(make_request([1] * 2000, id="a"), Sink())
        assert client.num_requests == 0
        client.add(make_request([1], id="b"), Sink())
        (message,) = await peer.hear()
        assert isinstance(message, Add)
        assert message.request.id == "b"

    talk(main)
