"""The engine at work for other processes: takes their requests, steps, and sends each what its requests gained."""

import logging
import os
import queue
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from hex_llm import frames
from hex_llm.engine.engine import Engine
from hex_llm.engine.output import Output
from hex_llm.engine.request import FinishReason
from hex_llm.engine.wire import Abort, Add, Alive, Ready, Refused, Starting, Stepped, ToEngine
from hex_llm.errors import RequestError

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
_FLUSH_S = 0.01  # how soon to try again where a process does not read
_MAX_UNSENT = 256 * 2**20


class Connection:
    """The engine's end of the socket to one HTTP process."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._unsent = bytearray()
        self._lock = threading.Lock()  # while it starts, progress is reported from several threads
        self.request_ids: set[str] = set()

    def __iter__(self) -> Iterator[ToEngine]:
        """The messages that come, until the other end has gone."""
        return frames.read_frames(self._socket, frames.Decoder[ToEngine](ToEngine))

    def send(self, message: msgspec.Struct) -> None:
        with self._lock:
            self._unsent += frames.encode(message)
            self._flush()

    def flush(self) -> bool:
        """Says whether all is sent. A process that does not read must not hold up the device."""
        with self._lock:
            return not self._unsent or self._flush()

    def _flush(self) -> bool:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            if len(self._unsent) > _MAX_UNSENT:
                logger.error("An HTTP process has not read %d bytes; it is given up.", len(self._unsent))
                self.close()
        except OSError:  # it has gone; the reader will say so
            self._unsent.clear()
        return not self._unsent

    def close(self) -> None:
        self._unsent.clear()
        self._socket.shutdown(socket.SHUT_RDWR)


class EngineHost:
    """Owns the connections from the process's first moment, so that the others see it start; `run` is its life."""

    def __init__(self, sockets: Sequence[socket.socket], *, queue_timeout: float):
        self._connections = [Connection(each) for each in sockets]
        self._queue_timeout = queue_timeout
        self._inbox: queue.SimpleQueue[tuple[Connection, ToEngine | None]] = queue.SimpleQueue()
        self._owners: dict[str, Connection] = {}
        self._arrivals: dict[str, float] = {}  # of requests that still wait, oldest first
        self._open = len(self._connections)
        self._lock = threading.Lock()
        self._late_compiles = 0
        self._ready = False
        for each in self._connections:
            threading.Thread(target=self._read, args=(each,), daemon=True, name="read").start()

    def tell(self, message: msgspec.Struct) -> None:
        for each in self._connections:
            each.send(message)

    def report(self, phase: str, done: float) -> None:
        """Tells how far something has come that may take minutes: getting ready, or a compilation later on."""
        if self._ready and done == 0:
            self._late_compiles += 1
        self.tell(Starting(phase, done))

    def run(self, engine: Engine, ready: Ready) -> None:
        """Serves until nobody is connected any more. What a step fails with is passed on."""
        self._ready = True
        self.tell(ready)
        last_alive = 0.0
        while True:
            self._take_messages(engine)
            worked = engine.has_work
            if worked:
                self._send(engine, engine.step())
            now = time.monotonic()
            if now - last_alive >= HEARTBEAT_S or (worked and not engine.has_work):
                last_alive = now
                self._expire(engine, now)
                self.tell(Alive(engine.stats(), self._late_compiles))

    def _read(self, connection: Connection) -> None:
        try:
            for message in connection:
                self._inbox.put((connection, message))
        except frames.Broken as error:
            logger.error("An HTTP process is disconnected: %s", error)
        with self._lock:
            self._open -= 1
            if not self._open:
                # Nobody is left to serve, and the main thread may be in the middle of a compilation.
                os._exit(0)
        self._inbox.put((connection, None))

    def _take_messages(self, engine: Engine) -> None:
        flushed = sum(each.flush() for each in self._connections) == len(self._connections)
        block = not engine.has_work
        while True:
            try:
                connection, message = self._inbox.get(block, timeout=HEARTBEAT_S if flushed else _FLUSH_S)
            except queue.Empty:
                return
            block = False
            match message:
                case Add(request):
                    try:
                        engine.add(request)
                    except RequestError as error:
                        connection.send(Refused(request.id, str(error), error.param, error.code, expired=False))
                    else:
                        self._owners[request.id] = connection
                        self._arrivals[request.id] = time.monotonic()
                        connection.request_ids.add(request.id)
                case Abort(request_ids, reason):
                    for request_id in request_ids:
                        engine.abort(request_id, reason)
                        self._forget(request_id)
                case None:
                    for request_id in list(connection.request_ids):
                        engine.abort(request_id)
                        self._forget(request_id)

    def _send(self, engine: Engine, outputs: Sequence[Output]) -> None:
        now = time.monotonic()
        outbox: defaultdict[Connection, Stepped] = defaultdict(lambda: Stepped([], []))
        for request_id in engine.take_begun():
            if arrival := self._arrivals.pop(request_id, None):
                outbox[self._owners[request_id]].begun.append((request_id, now - arrival))
        for output in outputs:
            if owner := self._owners.get(output.request_id):
                outbox[owner].outputs.append(output)
                if output.finish_reason is not None:
                    self._forget(output.request_id)
        for connection, message in outbox.items():
            connection.send(message)

    def _expire(self, engine: Engine, now: float) -> None:
        """Gives up requests that have waited for too long to begin."""
        while self._arrivals:
            request_id, arrival = next(iter(self._arrivals.items()))
            if now - arrival <= self._queue_timeout:
                return
            connection = self._owners[request_id]
            engine.abort(request_id, FinishReason.ABORT)
            self._forget(request_id)
            waited = f"The request waited for more than {self._queue_timeout:g} s for the engine to begin with it."
            connection.send(Refused(request_id, waited, None, "queue_timeout", expired=True))

    def _forget(self, request_id: str) -> None:
        if owner := self._owners.pop(request_id, None):
            owner.request_ids.discard(request_id)
        self._arrivals.pop(request_id, None)
