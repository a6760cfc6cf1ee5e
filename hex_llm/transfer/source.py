"""The engine that blocks are fetched from: a connection to it, made when it is first asked for something."""

import gc
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax

from hex_llm import channel
from hex_llm.engine.handover import PARTS_IN_FLIGHT
from hex_llm.frames import Broken
from hex_llm.transfer.copying import to_device
from hex_llm.transfer.line import Line
from hex_llm.transfer.offers import TransferServer, pull, take_here
from hex_llm.transfer.paths import Asked, Path, Unfit, choose
from hex_llm.transfer.slots import SHARED, Slots, memory_file
from hex_llm.transfer.staging import Staging, num_bytes
from hex_llm.transfer.words import Beat, Begin, Carried, Finished, Freed, FromSource, Hello, Refused, Word

_CONNECT_S = 10.0
_COLLECT_S = 0.01


class Fetches(Protocol):
    """Who is told what the source says, by the number of a fetch."""

    def expects(self, number: int, first: int) -> bool:
        """Waits until there is room for a part; False where it is not wanted, or the source has ended."""
        ...

    def wake(self) -> None:
        """The source has ended."""
        ...

    def wants(self, number: int) -> bool: ...

    def came(self, number: int, count: int, pages: jax.Array, seconds: float) -> None:
        """It took so long to carry it, without what it waited for."""
        ...

    def finished(self, number: int, token: int, end: int) -> None: ...

    def refused(self, number: int, reason: str) -> None: ...

    def tick(self, source: "Source") -> None:
        """Now and then."""
        ...

    def gone(self, source: "Source", reason: str) -> None:
        """Once, and last of all."""
        ...


class Source:
    """Has a thread that reads, and one that sends what it is given to say."""

    def __init__(
        self, address: str, key: bytes, hello: Hello, staging: Staging, fetches: Fetches, *, path: Asked,
        server: TransferServer | None, silence: float,
    ):  # fmt: skip
        self.address = address
        self._key = key
        self._hello = hello
        self._staging = staging
        self._fetches = fetches
        self._asked: Asked = path
        self._server = server
        self._silence = silence
        self._words: queue.SimpleQueue[Word | None] = queue.SimpleQueue()
        self._lent: set[int] = set()  # slots that are not given back
        self.ended = threading.Event()
        threading.Thread(target=self._run, daemon=True, name=f"fetch from {address}").start()

    def say(self, word: Word) -> None:
        """As soon as there is a connection."""
        self._words.put(word)

    def close(self) -> None:
        self.ended.set()
        self._words.put(None)
        self._fetches.wake()

    def _run(self) -> None:
        why = "what fetches from it has failed"
        try:
            found = channel.call(self.address, self._key, timeout=min(_CONNECT_S, self._silence))
            with found.socket:
                self._talk(Line(found, self._silence))
        except (OSError, Broken, Unfit) as error:
            why = str(error)
        finally:
            self.close()
            self._fetches.gone(self, f"The engine at {self.address} cannot be fetched from: {why.rstrip('.')}.")

    def _talk(self, line: Line) -> None:
        line.send(self._hello)
        there: Hello = line.receive(Hello)
        path = choose(self._asked, self._hello, there)
        shared = path == "host" and line.is_local and SHARED
        line.send(Begin(path, shared))
        memory = self._memory(line, shared=shared) if path == "host" else None
        get = self._way(path, there, memory)
        threading.Thread(target=self._write, args=(line,), daemon=True, name=f"ask {self.address}").start()
        schema = FromSource.__value__
        while not self.ended.is_set():
            word = line.receive(schema)
            match word:
                case Carried():
                    self._take(word, line, get, None if shared else memory)
                case Finished(number, token, end):
                    self._fetches.finished(number, token, end)
                case Refused(number, reason):
                    self._fetches.refused(number, reason)
        raise Broken("Its connection has ended.")

    def _memory(self, line: Line, *, shared: bool) -> Slots:
        size = num_bytes(self._staging, max(self._staging.counts))
        if not shared:
            return Slots(size, PARTS_IN_FLIGHT)
        file = memory_file(size, PARTS_IN_FLIGHT)
        try:
            line.send_file(file)
            return Slots(size, PARTS_IN_FLIGHT, file)
        finally:
            os.close(file)

    def _way(self, path: Path, there: Hello, memory: Slots | None) -> Callable[[Carried], jax.Array]:
        """How a part is had that the source has told of. Each gives back the slot."""
        staging = self._staging

        def through_host(word: Carried) -> jax.Array:
            assert memory is not None
            data = memory[word.slot][: num_bytes(staging, word.count)]
            return to_device(data, word.count, staging, partial(self._words.put, Freed(word.slot)))

        def within_process(word: Carried) -> jax.Array:
            pages = take_here(word.ticket, staging)
            self._words.put(Freed(word.slot))
            return pages

        if path == "host":
            return through_host
        if path == "device":
            return within_process
        assert self._server is not None
        connection = self._server.connect(there.transfer_server)

        def by_server(word: Carried) -> jax.Array:

            def wanted() -> bool:
                return not self.ended.is_set() and self._fetches.wants(word.number)

            pages = pull(connection, word.ticket, word.count, staging, seconds=self._silence, wanted=wanted)
            self._words.put(Freed(word.slot))
            return pages

        return by_server

    def _take(self, word: Carried, line: Line, get: Callable[[Carried], jax.Array], stream: Slots | None) -> None:
        if not (0 < word.count <= max(self._staging.counts) and 0 <= word.slot < PARTS_IN_FLIGHT):
            raise Broken(f"A part of {word.count} blocks in slot {word.slot} cannot be.")
        started = time.monotonic()
        if stream is not None:
            line.receive_bytes(stream[word.slot][: num_bytes(self._staging, word.count)])
        self._lent.add(word.slot)
        if self._fetches.expects(word.number, word.first):
            pages = get(word)
            self._fetches.came(word.number, word.count, pages, word.seconds + time.monotonic() - started)
        else:
            self._words.put(Freed(word.slot))

    def _write(self, line: Line) -> None:
        every = self._silence / 30
        beaten = time.monotonic()
        try:
            while not self.ended.is_set():
                try:
                    word = self._words.get(timeout=min(every, _COLLECT_S) if self._lent else every)
                except queue.Empty:
                    word = None
                    if self._lent:
                        gc.collect(0)  # JAX keeps memory of parts that are gone until something makes it look
                if word is not None:
                    line.send(word)
                if isinstance(word, Freed):
                    self._lent.discard(word.slot)
                if time.monotonic() - beaten >= every:
                    line.send(Beat())
                    self._fetches.tick(self)
                    beaten = time.monotonic()
        except (OSError, Broken):
            pass  # whoever reads finds out why
        finally:
            line.close()
            self.close()
