"""The engine at work for other processes: takes their requests, steps, and sends each what its requests gained."""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from hex_llm import frames
from hex_llm.channel import Channel
from hex_llm.engine.carrier import AdapterLost, FromCarrier
from hex_llm.engine.engine import Engine
from hex_llm.engine.handover import FromPorter, Lost, Taken
from hex_llm.engine.output import Output
from hex_llm.engine.request import FinishReason
from hex_llm.engine.wire import BLOCKS_LOST, Abort, Add, Alive, Beat, Ready, Refused, Starting, Stepped, ToEngine
from hex_llm.errors import RequestError

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
_CHECK_S = 60.0  # how often an engine that is idle looks whether it has lost anything
_LISTEN_S = 0.002  # between two looks at the step under way
_FLUSH_S = 0.01  # how soon to try again where a process does not read
_MAX_UNSENT = 256 * 2**20


class Connection:
    """The engine's end of the channel to one HTTP process."""

    def __init__(self, channel: Channel):
        self._socket = channel.socket
        self._seals = channel.seals
        self._unsent = bytearray()
        self._lock = threading.Lock()  # while it starts, progress is reported from several threads
        self.request_ids: set[str] = set()

    def __iter__(self) -> Iterator[ToEngine]:
        """The messages that come, until the other end has gone."""
        return frames.read_frames(self._socket, frames.Decoder[ToEngine](ToEngine, self._seals.incoming))

    def send(self, message: msgspec.Struct) -> None:
        with self._lock:
            self._unsent += frames.encode(message, self._seals.outgoing)
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
                self._end()
        except OSError:  # it has gone; the reader will say so
            self._unsent.clear()
        return not self._unsent

    def _end(self) -> None:
        """Both ends read that there is no more."""
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """For whoever reads from it, afterwards; what is sent later goes nowhere."""
        with self._lock:
            self._end()
            self._socket.close()


@dataclass(slots=True, eq=False)
class _Group:
    """The sequences of one HTTP request that are with the engine."""

    key: tuple[Connection, str]
    request_ids: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Entry:
    """A request of the engine's: whose it is, and since when."""

    connection: Connection
    group: _Group
    arrival: float


class EngineHost:
    """Owns the connections from the process's first moment, so that the others see it start; `run` is its life."""

    def __init__(self, channels: Sequence[Channel], *, queue_timeout: float):
        self._connections = [Connection(each) for each in channels]
        self._queue_timeout = queue_timeout
        self._inbox: queue.SimpleQueue[tuple[Connection, ToEngine | None] | FromPorter | FromCarrier]
        self._inbox = queue.SimpleQueue()
        self._entries: dict[str, _Entry] = {}
        self._groups: dict[tuple[Connection, str], _Group] = {}
        self._clocks: dict[_Group, float] = {}  # arrivals of those that nobody has begun with
        self._open = len(self._connections)
        self._lock = threading.Lock()
        self._late_compiles = 0
        self._late_compile_seconds = 0.0
        self._compiling_since = 0.0
        self._invariant_violations = 0
        self._ready = False
        self.before_end: Callable[[], None] = lambda: None  # called when nobody is left to serve
        for each in self._connections:
            threading.Thread(target=self._read, args=(each,), daemon=True, name="read").start()

    def hear(self, message: FromPorter | FromCarrier) -> None:
        """What the engine's porter and its carrier say, from any thread."""
        self._inbox.put(message)

    def tell(self, message: msgspec.Struct) -> None:
        for each in self._connections:
            each.send(message)

    def report(self, phase: str, done: float) -> None:
        """Tells how far something has come that may take minutes: getting ready, or a compilation later on."""
        if self._ready and done == 0:
            self._late_compiles += 1
            self._compiling_since = time.monotonic()
        elif self._ready and done == 1:
            self._late_compile_seconds += time.monotonic() - self._compiling_since
        self.tell(Starting(phase, done))

    def run(self, engine: Engine, ready: Ready) -> None:
        """Serves until nobody is connected any more. What a step fails with is passed on."""
        self._ready = True
        self.tell(ready)
        engine.while_waiting = lambda: self._take_messages(engine, _LISTEN_S)
        last_alive = last_check = 0.0
        while True:
            self._take_messages(engine)
            worked = engine.has_work
            if worked:
                self._send(engine, engine.step())
            now = time.monotonic()
            if now - last_alive >= HEARTBEAT_S or (worked and not engine.has_work):
                last_alive = now
                self._expire(engine, now)
                if engine.is_idle and now - last_check >= _CHECK_S:
                    last_check = now
                    self._check(engine)
                self.tell_state(engine)

    def tell_state(self, engine: Engine) -> None:
        """A sign of life, with what there is to count."""
        counts = self._late_compiles, self._late_compile_seconds, self._invariant_violations
        self.tell(Alive(engine.stats(), *counts))

    def _check(self, engine: Engine) -> None:
        """Looks whether an idle engine has lost anything. That is told and counted; most of it can still be served."""
        try:
            engine.check()
            assert not self._entries, "requests are left that the engine does not know"
            assert not self._groups, "groups are left without a request"
        except Exception:
            self._invariant_violations += 1
            logger.exception("The idle engine has lost something, which is a fault of the program.")

    def _read(self, connection: Connection) -> None:
        try:
            for message in connection:
                self._inbox.put((connection, message))
        except frames.Broken as error:
            logger.error("An HTTP process is disconnected: %s", error)
        except Exception:
            logger.exception("An HTTP process is disconnected.")
        finally:
            connection.close()
            with self._lock:
                self._open -= 1
                if not self._open:
                    try:
                        self.before_end()
                    finally:
                        # Nobody is left to serve, and the main thread may be in the middle of a compilation.
                        os._exit(0)
            self._inbox.put((connection, None))

    def _take_messages(self, engine: Engine, seconds: float | None = None) -> None:
        """Waits for the first of them: for so long, or where that is not said, until there is something to do."""
        flushed = sum(each.flush() for each in self._connections) == len(self._connections)
        block = seconds is not None or not engine.has_work or engine.is_stuck
        if seconds is None:
            seconds = HEARTBEAT_S if flushed else _FLUSH_S
        while True:
            try:
                message = self._inbox.get(block, timeout=seconds)
            except queue.Empty:
                return
            block = False
            if isinstance(message, tuple):
                self._take(engine, *message)
            else:
                self._tell(message, engine.hear(message))

    def _take(self, engine: Engine, connection: Connection, message: ToEngine | None) -> None:
        match message:
            case Add(request, group, waited):
                try:
                    engine.add(request)
                except RequestError as error:
                    connection.send(Refused(request.id, str(error), error.param, error.code, expired=False))
                else:
                    self._enter(connection, request.id, group, waited)
            case Abort(request_ids, reason):
                for request_id in connection.request_ids.intersection(request_ids):
                    self._end(engine, request_id, reason)
            case None:
                for request_id in list(connection.request_ids):
                    self._end(engine, request_id, FinishReason.ABORT)
            case Beat():
                pass  # it has come in order, and nothing before it is missing

    def _tell(self, message: FromPorter | FromCarrier, ended: Sequence[str]) -> None:
        """Tells of requests that have ended with what was heard."""
        match message:
            case Taken(request_id):
                self._forget(request_id)
            case Lost(request_id, reason):
                text = f"The blocks of the request could not be had from the engine that computed them: {reason}."
                self._refuse(Refused(request_id, text, None, BLOCKS_LOST, expired=False))
            case AdapterLost(_, text, code, status):
                for request_id in ended:
                    self._refuse(Refused(request_id, text, None, code, expired=False, status=status))

    def _refuse(self, message: Refused) -> None:
        if entry := self._entries.get(message.request_id):
            entry.connection.send(message)
            self._forget(message.request_id)

    def _send(self, engine: Engine, outputs: Sequence[Output]) -> None:
        now = time.monotonic()
        together: defaultdict[Connection, Stepped] = defaultdict(lambda: Stepped([], []))
        alone = []  # may be of any size
        for request_id in engine.take_begun():
            if entry := self._entries.get(request_id):
                together[entry.connection].begun.append((request_id, now - entry.arrival))
                self._clocks.pop(entry.group, None)
        for output in outputs:
            if entry := self._entries.get(output.request_id):
                if output.prompt_logprobs is None:
                    together[entry.connection].outputs.append(output)
                else:
                    alone.append((entry.connection, Stepped([output], [])))
                # One that was handed over stays its HTTP process's until another engine has it.
                if output.finish_reason not in (None, FinishReason.HANDED_OVER):
                    self._forget(output.request_id)
        for connection, message in (*together.items(), *alone):
            try:
                connection.send(message)
            except frames.Broken:
                self._refuse_large(engine, connection, message.outputs)

    def _refuse_large(self, engine: Engine, connection: Connection, outputs: Sequence[Output]) -> None:
        """Ends requests, finished or not, whose outputs cannot be sent."""
        for output in outputs:
            self._end(engine, output.request_id, FinishReason.ABORT)
            text = (
                f"The log-probabilities of {len(output.prompt_logprobs or ())} tokens of a prompt take more than "
                f"{frames.MAX_FRAME // 2**20} MiB; a shorter prompt or a smaller prompt_logprobs takes less."
            )
            connection.send(Refused(output.request_id, text, "prompt_logprobs", None, expired=False))

    def _expire(self, engine: Engine, now: float) -> None:
        """Gives up requests that have waited for too long to begin, or for another engine to take them."""
        for request_id in engine.expire(now):
            logger.error("No engine has taken request %s, which is computed; its blocks are given free.", request_id)
            self._forget(request_id)
        for group, arrival in list(self._clocks.items()):
            if now - arrival <= self._queue_timeout:
                continue
            connection, _ = group.key
            waited = f"The request waited for more than {self._queue_timeout:g} s for the engine to begin with it."
            for request_id in list(group.request_ids):
                self._end(engine, request_id, FinishReason.ABORT)
                connection.send(Refused(request_id, waited, None, "queue_timeout", expired=True))

    def _enter(self, connection: Connection, request_id: str, group_name: str, waited: float | None) -> None:
        key, arrival = (connection, group_name), time.monotonic() - (waited or 0.0)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(key)
            self._clocks[group] = arrival
        if waited is None:
            self._clocks.pop(group, None)
        group.request_ids.add(request_id)
        connection.request_ids.add(request_id)
        self._entries[request_id] = _Entry(connection, group, arrival)

    def _end(self, engine: Engine, request_id: str, reason: FinishReason) -> None:
        engine.abort(request_id, reason)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        if entry := self._entries.pop(request_id, None):
            group = entry.group
            entry.connection.request_ids.discard(request_id)
            group.request_ids.discard(request_id)
            if not group.request_ids:
                del self._groups[group.key]
                self._clocks.pop(group, None)
