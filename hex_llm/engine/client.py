"""An HTTP process's end of the connection to the engine: requests there, what comes of them back."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hex_llm.engine.output import Output, Stats
from hex_llm.engine.request import FinishReason, Request
from hex_llm.engine.wire import Abort, Add, Alive, Failed, Found, FromEngine, Ready, Refused, Starting, Stepped
from hex_llm.errors import EngineDead, HexError, RequestError, ServerError, Unavailable
from hex_llm.frames import FrameProtocol

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where the outputs of one request go. `fail` is the last call, as is an output with a finish reason."""

    def begin(self, waited: float) -> None: ...

    def take(self, output: Output) -> None: ...

    def fail(self, error: HexError) -> None: ...


class EngineClient:
    """`found` is what the engine knows of the model early, and `ready` its word that it serves. `lost` is set once it
    has gone, with or without having been ready.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.found: asyncio.Future[Found] = loop.create_future()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.lost = asyncio.Event()
        self.exit_code: int | None = None  # of a start that failed
        self.progress = Starting("starting", 0.0)
        self.stats: Stats | None = None
        self.late_compiles = 0
        self.on_step: Callable[[Sequence[Output]], None] = lambda outputs: None
        self._sinks: dict[str, Sink] = {}
        self._heard = time.monotonic()
        self._compiling = True
        self._protocol = FrameProtocol[FromEngine](FromEngine, self._take, self._lose)

    async def connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self._protocol, connection)

    @property
    def num_requests(self) -> int:
        return len(self._sinks)

    def add(self, request: Request, sink: Sink) -> None:
        if self.lost.is_set():
            raise EngineDead("The engine has stopped; the server is about to end.")
        self._sinks[request.id] = sink
        self._protocol.send(Add(request))

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends requests; their sinks hear no more. Those that have ended before are passed over."""
        left = [request_id for request_id in request_ids if self._sinks.pop(request_id, None)]
        if left:
            self._protocol.send(Abort(left, reason))

    def close(self) -> None:
        self._protocol.close()

    def silence(self) -> tuple[float, bool]:
        """Seconds since the engine was last heard of, and whether it may be compiling, which takes long."""
        return time.monotonic() - self._heard, self._compiling

    def _take(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        match message:
            case Stepped(outputs, begun):
                for request_id, waited in begun:
                    if sink := self._sinks.get(request_id):
                        sink.begin(waited)
                for output in outputs:
                    self._deliver(output)
                self.on_step(outputs)
            case Alive(stats, late_compiles):
                self.stats, self.late_compiles = stats, late_compiles
            case Refused(request_id, text, param, code, expired):
                if sink := self._sinks.pop(request_id, None):
                    sink.fail(
                        Unavailable(text, code="queue_timeout")
                        if expired
                        else RequestError(text, param=param, code=code)
                    )
            case Starting():
                self.progress = message
                self._compiling = not self.ready.done() or message.done < 1
            case Found():
                self.found.set_result(message)
            case Ready():
                self._compiling = False
                self.ready.set_result(message)
            case Failed(exit_code):
                self.exit_code = exit_code

    def _deliver(self, output: Output) -> None:
        finished = output.finish_reason is not None
        sink = self._sinks.pop(output.request_id, None) if finished else self._sinks.get(output.request_id)
        if sink is None:  # it was aborted while this was on its way
            return
        try:
            sink.take(output)
        except Exception:  # one request whose text cannot be made ends alone
            logger.exception("The output of request %s could not be taken in.", output.request_id)
            self.abort([output.request_id])
            sink.fail(ServerError("Internal error."))

    def _lose(self) -> None:
        self.lost.set()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail(EngineDead("The engine stopped while it worked on the request.", status=500))
