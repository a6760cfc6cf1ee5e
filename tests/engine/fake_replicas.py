"""Replicas without processes: a client each, and at its other end an engine that moves when it is told to.

What is said between them goes through the wire's schema, and nothing else is shared.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from hex_llm.engine.carrier import AdapterLost
from hex_llm.engine.client import EngineClient
from hex_llm.engine.engine import Engine
from hex_llm.engine.handover import Lost
from hex_llm.engine.output import Output
from hex_llm.engine.request import FinishReason, Request
from hex_llm.engine.router import Router
from hex_llm.engine.wire import (
    BLOCKS_LOST,
    Abort,
    Add,
    Alive,
    Failed,
    Found,
    FromEngine,
    Ready,
    Refused,
    Stepped,
    ToEngine,
)
from hex_llm.errors import HexError, RequestError
from hex_llm.frames import Decoder, encode
from tests.engine.fake_carrier import FakeCarrier
from tests.engine.fake_porter import FakePorter
from tests.engine.fakes import make_engine, make_request


class FakeReplica:
    """Both ends of a connection: the client's protocol, and the host of an engine."""

    def __init__(self, engine: Engine | None = None, *, porter: FakePorter | None = None, **changes):
        self.engine = engine or make_engine(porter=porter, **changes)[0]
        self.porter = porter
        self.client = EngineClient()
        self.client._protocol = self  # type: ignore[assignment]
        self.inbox: list[ToEngine] = []
        self.added: list[Add] = []  # all there ever were
        self.waiting: dict[str, str] = {}  # request -> group, of those whose clock runs
        self.unheard: list[msgspec.Struct] | None = None  # what it has said, while the router is slow to read
        self.dead = False

    def send(self, message: msgspec.Struct) -> None:
        if not self.dead:
            self.inbox += Decoder[ToEngine](ToEngine).feed(encode(message))

    def close(self) -> None:
        self.die()

    def abort(self) -> None:
        self.die()

    def die(self) -> None:
        if self.porter is not None and not self.dead:
            self.porter.die()
        self.dead = True
        if self.unheard is None:
            self.client._lose()

    def mute(self) -> None:
        """From now on nobody hears what it says, nor that it dies, until `unmute`: others may be heard before."""
        self.unheard = self.unheard or []

    def unmute(self) -> None:
        unheard, self.unheard = self.unheard or [], None
        self.say(*unheard)
        if self.dead:
            self.client._lose()

    def say(self, *messages: msgspec.Struct) -> None:
        if self.unheard is not None:
            self.unheard += messages
            return
        for message in messages:
            for each in Decoder[FromEngine](FromEngine).feed(encode(message)):
                self.client._take(each)

    def get_ready(self) -> None:
        self.say(Found(self.engine.limits.max_model_len, self.engine.limits.vocab_size))
        self.say(Ready(self.engine.limits, "float32", "a device", self.porter.address if self.porter else ""))

    def fail(self, exit_code: int) -> None:
        self.say(Failed(exit_code))
        self.die()

    def listen(self) -> None:
        """Takes in what was said to it."""
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            match message:
                case Add(request, group, waited):
                    self.added.append(message)
                    try:
                        self.engine.add(request)
                    except RequestError as error:
                        self.say(Refused(request.id, str(error), error.param, error.code, expired=False))
                    else:
                        if waited is not None:
                            self.waiting[request.id] = group
                case Abort(request_ids, reason):
                    for request_id in request_ids:
                        self.engine.abort(request_id, reason)
                        self.waiting.pop(request_id, None)

    def hear(self) -> None:
        """Takes in what its porter and its carrier say; adapters come at once."""
        carrier = self.engine._adapters._carrier
        if isinstance(carrier, FakeCarrier):
            carrier.bring_all()
            while carrier.said:
                lost = carrier.said.popleft()
                for request_id in self.engine.hear(lost):
                    assert isinstance(lost, AdapterLost)
                    self.say(Refused(request_id, lost.message, None, lost.code, expired=False, status=lost.status))
        while self.porter is not None and self.porter.said:
            message = self.porter.hear()
            self.engine.hear(message)
            if isinstance(message, Lost):
                self.say(Refused(message.request_id, message.reason, None, BLOCKS_LOST, expired=False))

    @property
    def is_busy(self) -> bool:
        if self.dead:
            return False
        return bool(self.inbox or self.engine.has_work or (self.porter is not None and self.porter.said))

    def step(self) -> None:
        if self.dead:
            return
        self.listen()
        self.hear()
        if self.engine.has_work:
            outputs = self.engine.step()
            begun = self.engine.take_begun()
            groups = {self.waiting.pop(request_id, None) for request_id in begun}
            self.waiting = {each: group for each, group in self.waiting.items() if group not in groups}
            self.say(Stepped(outputs, [(request_id, 0.0) for request_id in begun]))

    def expire(self) -> None:
        """Gives up whatever waits."""
        self.listen()
        waiting, self.waiting = self.waiting, {}
        for request_id in waiting:
            self.engine.abort(request_id)
            self.say(Refused(request_id, "Too late.", None, "queue_timeout", expired=True))

    def live(self) -> None:
        """Gives a sign of life."""
        self.say(Alive(self.engine.stats(), 1, 0.5, 0))

    def drain(self) -> None:
        while self.inbox or self.engine.has_work:
            self.step()


class Sink:
    """Keeps what it is told; stops the request or raises after so many tokens where a test wants it to."""

    def __init__(self, router: Router, request: Request, *, stop_after: int = 0, raise_after: int = 0):
        self.router, self.request = router, request
        self.stop_after, self.raise_after = stop_after, raise_after
        self.waited: list[float] = []
        self.outputs: list[Output] = []
        self.errors: list[HexError] = []
        self.stopped = False
        self.on_fail: Callable[[HexError], None] = lambda error: None

    def begin(self, waited: float) -> None:
        assert not self.ended
        self.waited.append(waited)

    def take(self, output: Output) -> None:
        assert not self.ended
        self.outputs.append(output)
        if len(self.tokens) == self.raise_after:
            raise ZeroDivisionError
        if len(self.tokens) == self.stop_after and output.finish_reason is None:
            self.stopped = True
            self.router.abort([self.request.id], FinishReason.STOP)

    def fail(self, error: HexError) -> None:
        assert not self.errors
        assert not self.stopped
        self.errors.append(error)
        self.on_fail(error)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.tokens]

    @property
    def ended(self) -> bool:
        return self.stopped or bool(self.errors) or self.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None


def connected(router: Router, make: Callable[[], FakeReplica] | None = None, **changes) -> list[FakeReplica]:
    """A replica for each that the router wants, all of them ready."""
    replicas = [make() if make else FakeReplica(**changes) for _ in router.replicas]
    for index, replica in enumerate(replicas):
        router.join(index, replica.client)
        replica.get_ready()
    return replicas


def add(router: Router, prompt, max_tokens: int = 4, *, group: str = "", **changes) -> Sink:
    sink_changes = {name: changes.pop(name) for name in ("stop_after", "raise_after") if name in changes}
    request = make_request(prompt, max_tokens, **changes)
    sink = Sink(router, request, **sink_changes)
    router.add(request, sink, group)
    return sink


def routed(num_replicas: int = 2, **router_changes):
    """Runs a test with a router, in a loop that timers can be waited for in."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def run(*args, **kwargs) -> None:
            async def main() -> None:
                await test(Router(num_replicas, **router_changes), *args, **kwargs)

            asyncio.run(main())

        run.__name__ = test.__name__
        return run

    return decorate


def replica_of(replicas: list[FakeReplica], sink: Sink) -> int:
    """Where a request was sent last."""
    for replica in replicas:
        replica.listen()
    sent_id = sink.router._entries[sink.request.id].sent_id
    (index,) = [i for i, each in enumerate(replicas) if each.engine._scheduler.find(sent_id)]
    return index


def check_empty(router: Router) -> None:
    assert router.num_requests == 0
    assert (router._entries, router._groups, router._held) == ({}, {}, {})
    assert [(each.num_requests, each.num_outstanding) for each in router.replicas] == [(0, 0)] * len(router.replicas)
