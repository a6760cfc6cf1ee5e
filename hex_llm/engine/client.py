"""An HTTP process's end of the connection to the engine: requests there, what comes of them back."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hex_llm.channel import Channel
from hex_llm.engine.output import Output
from hex_llm.engine.request import FinishReason, Request
from hex_llm.engine.wire import (
    BLOCKS_LOST,
    Abort,
    Add,
    Alive,
    Beat,
    Failed,
    Found,
    FromEngine,
    Ready,
    Refused,
    Starting,
    Stepped,
)
from hex_llm.errors import BlocksLost, EngineDead, HexError, ServerError, TooLarge, Unavailable, told_error
from hex_llm.frames import MAX_FRAME, Broken, FrameProtocol, attach

logger = logging.getLogger(__name__)

# One that is handed over is the engine's until another has it.
_NOT_ENDED = (None, FinishReason.HANDED_OVER)


class Sink(Protocol):
    """Where the outputs of one request go. `fail` is the last call, as is an output with a finish reason."""

    def begin(self, waited: float) -> None: ...

    def take(self, output: Output) -> None: ...

    def fail(self, error: HexError) -> None: ...


class EngineClient:
    """`found` is what the engine knows of the model early, and `ready` its word that it serves. `lost` is true once it
    has gone, with or without having been ready. Whenever one of them has changed, `on_change` is called; when the
    engine is lost, before its requests fail.
    """

    def __init__(self) -> None:
        self.found: Found | None = None
        self.ready: Ready | None = None
        self.lost = False
        self.exit_code: int | None = None  # that it says it ends with
        self.progress = Starting("starting", 0.0)
        self.alive: Alive | None = None  # the last sign of life
        self.on_step: Callable[[Sequence[Output]], None] = lambda outputs: None
        self.on_change: Callable[[], None] = lambda: None
        self._sinks: dict[str, Sink] = {}
        self._heard = time.monotonic()
        self._compiling = True
        self._ignored = False
        self._protocol = FrameProtocol[FromEngine](FromEngine, self._take, self._lose)

    async def connect(self, channel: Channel) -> None:
        await attach(self._protocol, channel.socket, channel.seals)

    @property
    def num_requests(self) -> int:
        return len(self._sinks)

    def add(self, request: Request, sink: Sink, group: str = "", waited: float | None = 0.0) -> None:
        """Hands a request over. `group` is one for all sequences of an HTTP request, and no other's: once one of them
        has begun, the others are not given up for having waited too long. `waited` is for how many seconds it has
        waited elsewhere, or None where it has begun there.
        """
        if self.lost:
            raise EngineDead("The engine has stopped; the server is about to end.")
        try:
            self._protocol.send(Add(request, group or request.id, waited))
        except Broken:
            raise TooLarge(f"The request takes more than {MAX_FRAME // 2**20} MiB, the most of one sequence.") from None
        self._sinks[request.id] = sink

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends requests; their sinks hear no more. Those that have ended before are passed over."""
        left = [request_id for request_id in request_ids if self._sinks.pop(request_id, None)]
        if left:
            self._protocol.send(Abort(left, reason))

    def beat(self) -> None:
        """To be called now and then."""
        self._protocol.send(Beat())

    def close(self) -> None:
        self._protocol.close()

    def ignore(self) -> None:
        """From now on, whatever the engine says is left unheard; its connection stays."""
        self._ignored = True

    def give_up(self) -> None:
        """Counts the engine as lost, whatever it still says, and ends the connection."""
        self._lose()
        self._protocol.abort()

    def silence(self) -> tuple[float, bool]:
        """Seconds since the engine was last heard of, and whether it may be compiling, which takes long."""
        return time.monotonic() - self._heard, self._compiling

    def _take(self, message: FromEngine) -> None:
        if self.lost or self._ignored:  # given up, and it goes on talking
            return
        self._heard = time.monotonic()
        match message:
            case Stepped(outputs, begun):
                self._step(outputs, begun)
            case Alive():
                self.alive = message
            case Refused(request_id):
                if sink := self._sinks.pop(request_id, None):
                    tell_failure(sink, _refusal(message))
            case Starting():
                self.progress = message
                self._compiling = self.ready is None or message.done < 1
            case Found():
                self.found = message
                self.on_change()
            case Ready():
                self._compiling = False
                self.ready = message
                self.on_change()
            case Failed(exit_code):
                self.exit_code = exit_code

    def _step(self, outputs: Sequence[Output], begun: Sequence[tuple[str, float]]) -> None:
        """Runs for every token: the loop is written out. One request whose text cannot be made ends alone."""
        sinks = self._sinks
        for request_id, waited in begun:
            if (sink := sinks.get(request_id)) is not None:
                try:
                    sink.begin(waited)
                except Exception:
                    self._give_up(request_id, sink)
        for output in outputs:
            request_id = output.request_id
            ended = output.finish_reason not in _NOT_ENDED
            sink = sinks.pop(request_id, None) if ended else sinks.get(request_id)
            if sink is not None:  # else it was aborted while this was on its way
                try:
                    sink.take(output)
                except Exception:
                    self._give_up(request_id, sink)
        if outputs:
            self.on_step(outputs)

    def _give_up(self, request_id: str, sink: Sink) -> None:
        logger.exception("The output of request %s could not be taken in.", request_id)
        self.abort([request_id])
        tell_failure(sink, ServerError("Internal error."))

    def _lose(self) -> None:
        if self.lost:
            return
        self.lost = True
        self.on_change()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            tell_failure(sink, EngineDead("The engine stopped while it worked on the request.", status=500))


def _refusal(refused: Refused) -> HexError:
    if refused.expired:
        return Unavailable(refused.message, code="queue_timeout")
    if refused.code == BLOCKS_LOST:
        return BlocksLost(refused.message, status=500)
    return told_error(refused.message, refused.code, refused.status, param=refused.param)


def tell_failure(sink: Sink, error: HexError) -> None:
    try:
        sink.fail(error)
    except Exception:  # the others are to be told all the same
        logger.exception("A request could not be told that it failed.")
