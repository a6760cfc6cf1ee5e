"""The engine at work for other processes: real sockets and threads, and a runner without a model."""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import msgspec
import pytest

from hex_llm import frames
from hex_llm.channel import Channel
from hex_llm.engine import host as host_module
from hex_llm.engine.carrier import AdapterHere, AdapterLost
from hex_llm.engine.engine import Engine
from hex_llm.engine.host import EngineHost
from hex_llm.engine.output import Output
from hex_llm.engine.request import FinishReason, Request
from hex_llm.engine.wire import Abort, Add, Alive, FromEngine, Ready, Refused, Starting, Stepped
from hex_llm.frames import Decoder, encode
from tests.engine.fake_carrier import FakeCarrier
from tests.engine.fakes import FakeRunner, alone, make_limits, make_request

PATIENCE_S = 10.0


class Stop(Exception):
    """Ends an engine that would serve on."""


class StoppableEngine(Engine):
    stopped = False
    checks = 0
    steps = 0

    def step(self) -> list[Output]:
        self.steps += 1
        return super().step()

    @property
    def has_work(self) -> bool:
        if self.stopped:
            raise Stop
        return super().has_work

    def check(self) -> None:
        assert not self.has_work, "a check takes time that the device should not have to wait"
        self.checks += 1
        super().check()


class Front:
    """What an HTTP process does: sends, and reads when it likes."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._seals = Channel(connection).seals
        self._decoder = Decoder[FromEngine](FromEngine, self._seals.incoming)
        self.messages: list[FromEngine] = []
        connection.settimeout(PATIENCE_S)

    def send(self, *messages: msgspec.Struct) -> None:
        self.connection.sendall(b"".join(encode(each, self._seals.outgoing) for each in messages))

    def add(self, *requests: Request, group: str = "", waited: float | None = 0.0) -> None:
        self.send(*(Add(request, group or request.id, waited) for request in requests))

    def read_until(self, true: Callable[[], object]) -> None:
        """Reads until something is true; fails where the other end goes first, or it takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            data = self.connection.recv(2**16)
            assert data, "the engine closed the connection"
            self.messages += self._decoder.feed(data)
            assert time.monotonic() < deadline, "it takes too long"

    def wait_for[Kind](self, kind: type[Kind], matches: Callable[[Kind], bool] = lambda message: True) -> Kind:
        """The first message of a kind that matches, be it one that was read before."""

        def found() -> list[Kind]:
            return [message for message in self.messages if isinstance(message, kind) and matches(message)]

        self.read_until(found)
        return found()[0]

    def wait_idle(self) -> Alive:
        """The word that a sign of life, yet to come, gives when nothing runs or waits."""
        seen = len(self.messages)

        def last() -> list[Alive]:
            return [
                message
                for message in self.messages[seen:]
                if isinstance(message, Alive) and not (message.stats.running or message.stats.waiting)
            ]

        self.read_until(lambda: len(last()) > 1)
        return last()[-1]

    def finish(self, *requests: Request) -> None:
        """Reads until requests have ended, well or not."""
        ids = {request.id for request in requests}
        self.read_until(lambda: ids <= self.ended)

    @property
    def outputs(self) -> list[Output]:
        return [output for message in self.messages if isinstance(message, Stepped) for output in message.outputs]

    @property
    def begun(self) -> dict[str, float]:
        return dict(pair for message in self.messages if isinstance(message, Stepped) for pair in message.begun)

    @property
    def refused(self) -> dict[str, Refused]:
        return {message.request_id: message for message in self.messages if isinstance(message, Refused)}

    @property
    def ended(self) -> set[str]:
        return {output.request_id for output in self.outputs if output.finish_reason} | {*self.refused}

    def tokens(self, request: Request) -> list[int]:
        return [token for output in self.outputs if output.request_id == request.id for token in output.tokens]

    def is_cut_off(self) -> bool:
        """Reads on to the connection's end."""
        try:
            while self.connection.recv(2**16):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True


class Serving:
    """A host that serves, and its fronts. `gate` holds up every read of a step while it is not set."""

    def __init__(self, num_fronts: int, queue_timeout: float, max_in_flight: int = 1, **limits):
        self.limits = make_limits(**({"max_model_len": 256} | limits))
        self.runner = FakeRunner(self.limits)
        self.carrier = FakeCarrier() if self.limits.num_adapters else None
        self.engine = StoppableEngine(self.runner, self.limits, max_in_flight=max_in_flight, carrier=self.carrier)
        self.gate = threading.Event()
        self.gate.set()
        self.held_up = False
        self.pause = 0.0
        self.runner.fault = self._hold
        self.error: BaseException | None = None
        pairs = [socket.socketpair() for _ in range(num_fronts)]
        self.fronts = [Front(front) for front, _ in pairs]
        self.sockets = [ours for _, ours in pairs]
        others = {*threading.enumerate()}
        self.host = EngineHost([Channel(each) for each in self.sockets], queue_timeout=queue_timeout)
        self.readers = {*threading.enumerate()} - others
        self.thread = threading.Thread(target=self._run)

    def _hold(self, where: str) -> None:
        if where == "read":
            self.held_up = not self.gate.is_set()
            assert self.gate.wait(PATIENCE_S)
            self.held_up = False
            time.sleep(self.pause)

    def _run(self) -> None:
        try:
            self.host.run(self.engine, Ready(self.limits, "float32", "none"))
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.engine.stopped = True
        self.gate.set()
        for front in self.fronts:
            front.connection.close()
        self.thread.join(PATIENCE_S)
        for reader in self.readers:
            reader.join(PATIENCE_S)
        assert not self.thread.is_alive()
        assert not any(reader.is_alive() for reader in self.readers)

    def wait_for_messages(self, count: int) -> None:
        """Until a step is held up, and the host has taken so many messages or will take them after that step.

        Before the step is, an abort could be taken in between and never be seen to wait.
        """
        wait_until(lambda: self.held_up and len(self.host._entries) + self.host._inbox.qsize() == count)

    @property
    def remembered(self) -> list[object]:
        """All that the host keeps of requests."""
        host = self.host
        ids = [request_id for connection in host._connections for request_id in connection.request_ids]
        return [*host._entries, *host._groups, *host._clocks, *ids]


class Clock:
    """The host's, and how many seconds it is ahead."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(host_module, "time", clock)
    return clock


@pytest.fixture
def exits(monkeypatch) -> list[int]:
    """The codes with which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(host_module, "os", SimpleNamespace(_exit=codes.append))
    monkeypatch.setattr(host_module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(host_module, "_CHECK_S", 0.0)
    return codes


@pytest.fixture
def serve(exits):
    """Starts a host, and ends it with its threads before anything that was patched is as it was."""

    @contextlib.contextmanager
    def start(num_fronts: int = 1, *, queue_timeout: float = 600.0, **limits) -> Iterator[Serving]:
        serving = Serving(num_fronts, queue_timeout, **limits)
        serving.thread.start()
        try:
            yield serving
        finally:
            serving.stop()

    return start


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        time.sleep(0.002)
        assert time.monotonic() < deadline, "it takes too long"


def test_a_front_is_told_that_the_engine_is_ready_and_then_that_it_lives(serve):
    with serve() as serving:
        (front,) = serving.fronts
        assert front.wait_for(Ready).limits == serving.limits
        alive = front.wait_idle()
        assert (alive.stats.running, alive.late_compiles, alive.invariant_violations) == (0, 0, 0)


def test_each_front_gets_the_outputs_of_its_own_requests_and_no_others(serve):
    with serve(2) as serving:
        serving.gate.clear()
        requests = [[make_request([n, m], 3 + m) for m in range(5)] for n in range(2)]
        for front, own in zip(serving.fronts, requests, strict=True):
            front.add(*own)
        serving.gate.set()
        for front, own in zip(serving.fronts, requests, strict=True):
            front.finish(*own)
            assert {output.request_id for output in front.outputs} == {request.id for request in own}
            assert {*front.begun} == {request.id for request in own}
            assert all(0 <= waited < PATIENCE_S for waited in front.begun.values())
            for request in own:
                assert front.tokens(request) == alone(request)
        assert serving.fronts[0].wait_idle().invariant_violations == 0
        assert serving.remembered == []


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_a_request_begins_before_its_first_output(serve, max_in_flight, prompt_logprobs):
    with serve(max_in_flight=max_in_flight) as serving:
        (front,) = serving.fronts
        request = make_request([1], 3, prompt_logprobs=prompt_logprobs)
        front.add(request)
        front.finish(request)
        steps = [message for message in front.messages if isinstance(message, Stepped)]
        began = next(i for i, step in enumerate(steps) if step.begun)
        assert not any(step.outputs for step in steps[:began])


def test_a_request_that_the_engine_does_not_take_is_refused_and_forgotten(serve):
    with serve() as serving:
        (front,) = serving.fronts
        bad, good = make_request([1000], 3), make_request([1], 3)
        front.add(bad, good)
        front.finish(bad, good)
        refused = front.refused[bad.id]
        assert "1000" in refused.message
        assert (refused.param, refused.expired) == ("prompt", False)
        assert front.tokens(good) == alone(good)
        assert front.wait_idle().invariant_violations == 0
        assert serving.remembered == []


def test_an_aborted_request_ends_and_the_others_do_not(serve):
    with serve() as serving:
        (front,) = serving.fronts
        serving.gate.clear()
        aborted, other = make_request([1], 50), make_request([2], 50)
        front.add(aborted, other)
        serving.wait_for_messages(2)
        front.send(Abort([aborted.id, "of nobody"], FinishReason.STOP))
        serving.wait_for_messages(3)
        serving.gate.set()
        front.finish(other)
        assert front.tokens(other) == alone(other)
        assert len(front.tokens(aborted)) <= 1
        assert aborted.id not in front.ended
        assert front.wait_idle().invariant_violations == 0
        assert serving.remembered == []


def test_a_front_cannot_abort_what_is_not_its_own(serve):
    with serve(2) as serving:
        owner, other = serving.fronts
        serving.gate.clear()
        request = make_request([1], 8)
        owner.add(request)
        serving.wait_for_messages(1)
        other.send(Abort([request.id], FinishReason.ABORT))
        serving.wait_for_messages(2)
        serving.gate.set()
        owner.finish(request)
        assert owner.tokens(request) == alone(request)


def test_the_requests_of_a_front_that_goes_end_with_it_and_no_others(serve, exits):
    with serve(2) as serving:
        stays, goes = serving.fronts
        serving.pause = 0.002
        kept, dropped = make_request([1], 30), [make_request([2 + n], 60) for n in range(3)]
        stays.add(kept)
        goes.add(*dropped)
        goes.read_until(lambda: len(goes.begun) == 3)
        goes.connection.close()
        stays.finish(kept)
        assert stays.tokens(kept) == alone(kept)
        idle = stays.wait_idle()
        assert (idle.invariant_violations, idle.stats.blocks_used) == (0, 0)
        assert serving.remembered == []
        assert idle.stats.total_steps < 50  # those dropped would have taken 60
        assert exits == []


def test_when_the_last_front_has_gone_the_process_ends(serve, exits):
    with serve(3) as serving:
        for count, front in enumerate(serving.fronts, 1):
            assert exits == []
            front.connection.close()
            wait_until(lambda count=count: serving.host._open == 3 - count)
        wait_until(lambda: exits == [0])


def test_the_process_ends_with_the_last_front_even_before_it_is_ready(exits):
    serving = Serving(1, 600.0)
    serving.fronts[0].connection.close()
    wait_until(lambda: exits == [0])


def test_a_front_that_sends_what_is_no_message_is_cut_off_and_the_others_are_not(serve, exits):
    with serve(2) as serving:
        stays, goes = serving.fronts
        serving.gate.clear()
        kept, dropped = make_request([1], 5), make_request([2], 200)
        stays.add(kept)
        goes.add(dropped)
        serving.wait_for_messages(2)
        goes.send(Starting("what only an engine says", 0.0))
        assert goes.is_cut_off()
        serving.gate.set()
        stays.finish(kept)
        assert stays.tokens(kept) == alone(kept)
        stays.wait_idle()
        assert serving.remembered == []
        assert serving.sockets[1].fileno() == -1
        stays.connection.close()
        wait_until(lambda: exits == [0])


def test_a_front_whose_reader_fails_in_any_way_is_cut_off_and_counted_out(serve, exits, monkeypatch, caplog):
    def fail(connection, decoder):
        raise RuntimeError("a fault of ours")
        yield

    monkeypatch.setattr(host_module.frames, "read_frames", fail)
    with serve(1) as serving:
        assert serving.fronts[0].is_cut_off()
        wait_until(lambda: exits == [0])
    assert "An HTTP process is disconnected." in caplog.messages


def test_a_front_that_does_not_read_holds_up_nobody_and_gets_all_of_it_later(serve):
    with serve(2, num_blocks=1025, max_model_len=1024) as serving:
        fast, slow = serving.fronts
        serving.sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        late = [make_request([n, n + 1], 900) for n in range(4)]
        slow.add(*late)
        for n in range(5):
            request = make_request([n], 50)
            fast.add(request)
            fast.finish(request)
            assert fast.tokens(request) == alone(request)
        fast.wait_idle()
        assert len(serving.host._connections[1]._unsent) > 2**14
        slow.finish(*late)
        for request in late:
            assert slow.tokens(request) == alone(request)
        wait_until(lambda: not serving.host._connections[1]._unsent)


def test_a_front_that_never_reads_is_given_up(serve, monkeypatch, caplog):
    monkeypatch.setattr(host_module, "_MAX_UNSENT", 2**14)
    with serve(2, num_blocks=1025, max_model_len=1024) as serving:
        fast, slow = serving.fronts
        serving.sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        late = [make_request([n, n + 1], 900) for n in range(4)]
        slow.add(*late)
        wait_until(lambda: serving.host._open == 1)
        request = make_request([1], 20)
        fast.add(request)
        fast.finish(request)
        assert fast.tokens(request) == alone(request)
        assert fast.wait_idle().invariant_violations == 0
        assert serving.remembered == []
        assert slow.is_cut_off()
    assert "it is given up" in caplog.text


# Time in the queue.
#
# What runs takes 4 ms for a token, so that there is a second in which to put the clock ahead while another one waits.
TOKENS, PAUSE_S = 250, 0.004


def test_a_request_that_waits_for_too_long_is_given_up(serve, clock):
    with serve(queue_timeout=100, max_running=1) as serving:
        (front,) = serving.fronts
        serving.pause = PAUSE_S
        running, waiting = make_request([1], TOKENS), make_request([2], 5)
        front.add(running, waiting)
        wait_until(lambda: len(serving.host._entries) == 2)
        clock.ahead = 99
        time.sleep(0.1)
        assert len(serving.host._entries) == 2
        clock.ahead = 101
        front.finish(waiting)
        refused = front.refused[waiting.id]
        assert (refused.expired, refused.code, refused.param) == (True, "queue_timeout", None)
        assert "100 s" in refused.message
        assert running.id not in front.ended
        serving.pause = 0
        front.finish(running)
        assert front.tokens(running) == alone(running)
        assert waiting.id not in front.begun
        assert front.wait_idle().invariant_violations == 0
        assert serving.remembered == []


def test_sequences_of_a_group_wait_for_each_other_without_a_limit(serve, clock):
    with serve(queue_timeout=100, max_running=1) as serving:
        (front,) = serving.fronts
        serving.pause = PAUSE_S
        group = [make_request([n], TOKENS) for n in range(3)]
        front.add(*group[:2], group="one")
        front.read_until(lambda: front.begun)
        front.add(group[2], group="one")  # a group that has begun stays so
        wait_until(lambda: len(serving.host._entries) == 3)
        clock.ahead = 101
        seen = len(front.messages)
        front.read_until(lambda: sum(isinstance(message, Alive) for message in front.messages[seen:]) > 2)
        serving.pause = 0
        front.finish(*group)
        assert front.refused == {}
        assert front.begun[group[0].id] < 100 < front.begun[group[2].id]
        for request in group:
            assert front.tokens(request) == alone(request)
        assert front.wait_idle().invariant_violations == 0
        assert serving.remembered == []


def test_a_group_of_which_none_has_begun_is_given_up_as_a_whole(serve, clock):
    with serve(2, queue_timeout=100, max_running=1) as serving:
        front, other = serving.fronts
        serving.pause = PAUSE_S
        running, waiting = make_request([1], TOKENS), [make_request([n], 5) for n in range(3)]
        front.add(running, group="one")
        front.read_until(lambda: front.begun)
        # A group belongs to its front: this is another one, which happens to have the same name.
        other.add(*waiting, group="one")
        wait_until(lambda: len(serving.host._entries) == 4)
        clock.ahead = 101
        other.finish(*waiting)
        assert {*other.refused} == {request.id for request in waiting}
        serving.pause = 0
        front.finish(running)
        assert front.refused == {}
        assert front.wait_idle().invariant_violations == 0
        assert serving.remembered == []


def test_the_name_of_a_group_that_is_done_stands_for_another(serve, clock):
    with serve(queue_timeout=100, max_running=1) as serving:
        (front,) = serving.fronts
        done, running, waiting = make_request([1], 2), make_request([2], TOKENS), make_request([3], 5)
        front.add(done, group="one")
        front.finish(done)
        serving.pause = PAUSE_S
        front.add(running, group="two")
        front.add(waiting, group="one")
        wait_until(lambda: len(serving.host._entries) == 2)
        clock.ahead = 101
        front.finish(waiting)
        assert {*front.refused} == {waiting.id}


def test_only_what_is_too_old_is_given_up(serve, clock):
    with serve(queue_timeout=100, max_running=1) as serving:
        (front,) = serving.fronts
        serving.pause = PAUSE_S
        running, old, young = make_request([1], TOKENS), make_request([2], 5), make_request([3], 5)
        front.add(running, old)
        wait_until(lambda: len(serving.host._entries) == 2)
        clock.ahead = 60
        front.add(young)
        wait_until(lambda: len(serving.host._entries) == 3)
        clock.ahead = 110
        front.finish(old)
        serving.pause = 0
        front.finish(running, young)
        assert {*front.refused} == {old.id}
        assert front.tokens(young) == alone(young)


def test_time_spent_waiting_elsewhere_counts_and_what_has_begun_there_waits_without_a_limit(serve, clock):
    with serve(queue_timeout=100, max_running=1) as serving:
        (front,) = serving.fronts
        serving.pause = PAUSE_S
        running, fresh, moved, begun = (make_request([n], TOKENS if n == 1 else 5) for n in range(1, 5))
        sibling = make_request([5], 5)
        front.add(running, fresh)
        front.add(sibling, group="one")
        front.add(moved, waited=60)
        front.add(begun, group="one", waited=None)
        wait_until(lambda: len(serving.host._entries) == 5)
        clock.ahead = 50
        front.finish(moved)
        clock.ahead = 101
        front.finish(fresh)
        assert {*front.refused} == {moved.id, fresh.id}
        serving.pause = 0
        front.finish(running, begun, sibling)
        assert front.tokens(begun) == alone(begun)
        assert front.tokens(sibling) == alone(sibling)
        assert front.wait_idle().invariant_violations == 0
        assert serving.remembered == []


# Messages of any size.


def test_the_log_probabilities_of_a_prompt_travel_alone(serve):
    with serve() as serving:
        (front,) = serving.fronts
        serving.gate.clear()
        told = [make_request([n] * 20, 3, prompt_logprobs=2) for n in range(2)]
        plain = [make_request([n], 3) for n in range(3)]
        front.add(*told, *plain)
        serving.wait_for_messages(5)
        serving.gate.set()
        front.finish(*told, *plain)
        steps = [message for message in front.messages if isinstance(message, Stepped)]
        large = [step for step in steps if any(output.prompt_logprobs for output in step.outputs)]
        assert [len(step.outputs) for step in large] == [1, 1]
        assert all(len(step.outputs[0].prompt_logprobs) == 20 for step in large)
        for request in (*told, *plain):
            assert front.tokens(request) == alone(request)


@pytest.mark.parametrize("max_tokens", [1, 20])
def test_a_request_whose_output_no_message_can_hold_fails_alone(serve, monkeypatch, max_tokens):
    with serve() as serving:
        (front,) = serving.fronts
        monkeypatch.setattr(frames, "MAX_FRAME", 2000)
        serving.gate.clear()
        large, plain = make_request([1] * 60, max_tokens, prompt_logprobs=3), make_request([2], 30)
        front.add(large, plain)
        serving.wait_for_messages(2)
        serving.gate.set()
        front.finish(large, plain)
        refused = front.refused[large.id]
        assert "60 tokens" in refused.message
        assert (refused.param, refused.code, refused.expired) == ("prompt_logprobs", None, False)
        assert front.tokens(large) == []
        assert front.tokens(plain) == alone(plain)
        assert front.wait_idle().invariant_violations == 0
        assert serving.remembered == []
        assert serving.error is None


# What the engine says of itself.


def test_a_step_that_fails_is_passed_on(serve):
    with serve() as serving:
        (front,) = serving.fronts

        def fail(where: str) -> None:
            raise MemoryError("of the device")

        serving.runner.fault = fail
        front.add(make_request([1], 3))
        serving.thread.join(PATIENCE_S)
        assert isinstance(serving.error, MemoryError)


def test_an_engine_that_only_waits_for_an_adapter_waits_until_its_carrier_speaks(serve):
    with serve(num_adapters=1) as serving:
        (front,) = serving.fronts
        request = make_request([1], 3, adapter="a")
        front.add(request)
        wait_until(lambda: serving.engine.is_stuck and serving.engine.steps)
        before = serving.engine.steps
        time.sleep(0.2)
        assert serving.engine.steps - before < 50, "it looks again and again"
        serving.host.hear(AdapterHere("a", "a"))
        front.finish(request)
        assert front.tokens(request) == alone(request)
        assert front.wait_idle().invariant_violations == 0
        assert serving.remembered == []


def test_requests_whose_adapter_cannot_be_had_are_refused_with_the_carriers_words_and_no_others(serve):
    with serve(2, num_adapters=1) as serving:
        first, second = serving.fronts
        bad = [make_request([1], 3, adapter="bad") for _ in range(3)]
        good, base = make_request([1], 40, adapter="good"), make_request([2], 40)
        first.add(*bad[:2], good)
        second.add(bad[2], base)
        wait_until(lambda: len(serving.host._entries) == 5)
        serving.host.hear(AdapterHere("good", "good"))
        serving.host.hear(AdapterLost("bad", "It is no adapter.", "adapter_invalid", 404))
        first.finish(*bad[:2], good)
        second.finish(bad[2], base)
        refused = [front.refused for front in serving.fronts]
        assert [{*each} for each in refused] == [{bad[0].id, bad[1].id}, {bad[2].id}]
        for each in (refused[0] | refused[1]).values():
            assert (each.message, each.code, each.status, each.expired) == (
                "It is no adapter.", "adapter_invalid", 404, False,
            )  # fmt: skip
        assert first.tokens(good) == alone(good)
        assert second.tokens(base) == alone(base)
        assert first.wait_idle().invariant_violations == 0
        assert serving.remembered == []


def test_compilations_are_counted_and_timed_once_it_is_ready(exits):
    serving = Serving(1, 600.0)
    (front,) = serving.fronts
    serving.host.report("compiling", 0.0)
    serving.host.report("compiling", 1.0)
    serving.thread.start()
    try:
        assert front.wait_for(Starting) == Starting("compiling", 0.0)
        assert front.wait_idle().late_compiles == 0
        serving.host.report("compiling", 0.0)
        time.sleep(0.05)
        assert front.wait_for(Alive, lambda alive: alive.late_compiles == 1).late_compile_seconds == 0
        serving.host.report("compiling", 1.0)
        seconds = front.wait_for(Alive, lambda alive: alive.late_compile_seconds > 0).late_compile_seconds
        assert 0.05 <= seconds < PATIENCE_S
    finally:
        serving.stop()


def test_an_idle_engine_that_has_lost_a_block_says_so_and_serves_on(serve, caplog):
    with serve() as serving:
        (front,) = serving.fronts
        assert front.wait_idle().invariant_violations == 0
        serving.engine._scheduler.pool._free.popitem()
        first = front.wait_for(Alive, lambda alive: alive.invariant_violations > 0)
        front.wait_for(Alive, lambda alive: alive.invariant_violations > first.invariant_violations)
        request = make_request([1], 5)
        front.add(request)
        front.finish(request)
        assert front.tokens(request) == alone(request)
        record = next(record for record in caplog.records if "lost something" in record.getMessage())
        assert record.levelname == "ERROR"
        assert record.exc_info is not None


def test_a_host_that_has_lost_track_of_a_request_says_so(serve):
    with serve() as serving:
        (front,) = serving.fronts
        request = make_request([1], 5)
        front.add(request)
        front.finish(request)
        assert front.wait_idle().invariant_violations == 0
        serving.host._enter(serving.host._connections[0], "lost", "lost", 0.0)
        front.wait_for(Alive, lambda alive: alive.invariant_violations > 0)
        serving.host._forget("lost")


def test_an_idle_engine_is_checked_once_in_a_while_and_a_busy_one_never(serve, monkeypatch):
    monkeypatch.setattr(host_module, "_CHECK_S", 60.0)
    with serve() as serving:
        (front,) = serving.fronts
        for _ in range(3):
            request = make_request([1], 5)
            front.add(request)
            front.finish(request)
            front.wait_idle()
        assert serving.engine.checks == 1


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_in_whatever_order_is_answered_right_and_forgotten(serve, seed):
    draw = random.Random(seed)
    with serve(3, num_blocks=33, max_running=draw.choice((2, 4, 8))) as serving:
        *stay, goes = serving.fronts
        requests: dict[int, list[Request]] = {0: [], 1: []}
        aborted = set()
        for _ in range(40):
            index = draw.randrange(3)
            made = [make_request([draw.randrange(40) for _ in range(draw.randint(1, 20))], draw.randint(1, 20))]
            made += [make_request([1, 2], 5, prompt_logprobs=1) for _ in range(draw.randint(0, 2))]
            if index == 2:
                goes.add(*made, group="all")
                continue
            stay[index].add(*made, group=draw.choice(("", "all")))
            requests[index] += made
            if draw.random() < 0.3:
                victim = draw.choice(requests[index])
                aborted.add(victim.id)
                stay[index].send(Abort([victim.id], FinishReason.ABORT))
        goes.connection.close()
        for index, front in enumerate(stay):
            front.finish(*(request for request in requests[index] if request.id not in aborted))
            assert front.refused == {}
            assert {output.request_id for output in front.outputs} <= {request.id for request in requests[index]}
            for request in requests[index]:
                tokens, expected = front.tokens(request), alone(request)
                assert tokens == expected or (request.id in aborted and tokens == expected[: len(tokens)])
        assert stay[0].wait_idle().invariant_violations == 0
        assert serving.remembered == []
