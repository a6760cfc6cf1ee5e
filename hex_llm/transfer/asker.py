"""Another engine that asks for blocks here: its connection, and the parts on their way to it.

Parts wait for a slot. Each engine that asks has a few, and gives one back when it has taken what was there: one that is
slow holds up its own parts.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from hex_llm.engine.handover import PARTS_IN_FLIGHT, Part
from hex_llm.frames import Broken
from hex_llm.transfer.copying import to_host
from hex_llm.transfer.line import Line
from hex_llm.transfer.offers import Offers
from hex_llm.transfer.slots import Slots
from hex_llm.transfer.staging import Staging, num_bytes
from hex_llm.transfer.words import Beat, Carried, Word

logger = logging.getLogger(__name__)

# How often to look whether a part has been computed: so that it is not noticed later than by this share of the time.
_POLL_SHARE = 0.02
_POLL_S = 1e-4


class Asker:
    """Its thread sends; whoever reads the connection calls `freed` and `leave`. `released` is called whenever there is
    a part less here."""

    def __init__(
        self, line: Line, staging: Staging, carrier: Slots | Offers, *, streams: bool, silence: float,
        released: Callable[[], None],
    ):  # fmt: skip
        self.requests: dict[int, str] = {}  # by the number of the fetch; for whoever made this
        self._line = line
        self._staging = staging
        self._carrier = carrier
        self._streams = streams
        self._silence = silence
        self._beat = silence / 30
        self._released = released
        self._words: queue.SimpleQueue[Word | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._parts: deque[tuple[int, Part, int]] = deque()
        self._free = deque(range(PARTS_IN_FLIGHT))
        self._offered: dict[int, int] = {}  # slots whose part stays here until it is fetched, and its ticket
        self._in_hand = 0  # parts that are neither waiting nor offered
        self._left = False
        self._moved = time.monotonic()
        threading.Thread(target=self._write, daemon=True, name="send blocks").start()

    @property
    def num_staged(self) -> int:
        with self._lock:
            return len(self._parts) + len(self._offered) + self._in_hand

    def say(self, word: Word) -> None:
        self._words.put(word)

    @property
    def cuts_parts(self) -> bool:
        """Whether it can be sent less than a whole part."""
        return isinstance(self._carrier, Slots)

    def send(self, number: int, part: Part, skip: int = 0) -> None:
        """All blocks of the part but the first few, which the other engine has."""
        with self._lock:
            if not self._parts:
                self._moved = time.monotonic()
            self._parts.append((number, part, skip))
        self._words.put(None)

    def discard(self, number: int) -> None:
        """Parts of this fetch that still wait."""
        with self._lock:
            self._parts = deque(each for each in self._parts if each[0] != number)
        self._released()

    def freed(self, slot: int) -> None:
        with self._lock:
            if not 0 <= slot < PARTS_IN_FLIGHT or slot in self._free:
                raise Broken(f"Slot {slot} was given back, and it is free.")
            self._free.append(slot)
            self._moved = time.monotonic()
            tickets = [self._offered.pop(slot)] if slot in self._offered else []
        self._withdraw(tickets)
        self._words.put(None)
        self._released()

    def close(self) -> None:
        self._line.close()

    def leave(self) -> tuple[int, float]:
        """Nothing goes to it any more. Returns how many parts stay here nevertheless, and for how many seconds."""
        self._line.close()
        with self._lock:
            self._left = True
            self._parts.clear()
            tickets = [*self._offered.values()]
            self._offered.clear()
        self._words.put(None)
        return self._withdraw(tickets)

    def _withdraw(self, tickets: list[int]) -> tuple[int, float]:
        if isinstance(self._carrier, Slots) or not tickets:
            return 0, 0.0
        for ticket in tickets:
            self._carrier.withdraw(ticket)
        return len(tickets), self._carrier.linger

    def _write(self) -> None:
        try:
            while not self._left:
                try:
                    word = self._words.get(timeout=self._beat)
                except queue.Empty:
                    word = Beat()
                if word is not None:
                    self._line.send(word)
                while self._words.empty() and self._carry_next():
                    pass
                self._check()
        except (OSError, Broken) as error:
            logger.info("Blocks can no longer be sent to another engine: %s", error)
        finally:
            self._line.close()

    def _check(self) -> None:
        with self._lock:
            waits = self._parts or self._offered
            if waits and time.monotonic() - self._moved > self._silence:
                raise Broken(f"It has taken no block for {self._silence:g} s.")

    def _carry_next(self) -> bool:
        with self._lock:
            if self._left or not (self._parts and self._free):
                return False
            number, part, skip = self._parts.popleft()
            slot = self._free.popleft()
            self._in_hand += 1
        first, count, ticket = part.first + skip, part.count - skip, 0
        try:
            self._wait_for(part.pages)
            started = time.monotonic()
            if isinstance(self._carrier, Slots):
                data = self._carrier[slot][: num_bytes(self._staging, count)]
                to_host(part.pages, skip, count, data)
            else:
                data = memoryview(b"")
                ticket = self._carrier.offer(part.pages)
        finally:
            del part  # its memory on the device is what others wait for
            with self._lock:
                self._in_hand -= 1
                if ticket:
                    self._offered[slot] = ticket
                tickets = [*self._offered.values()] if self._left else []
            self._withdraw(tickets)
            self._released()
        self._line.send(Carried(number, first, count, slot, ticket, time.monotonic() - started))
        if self._streams:
            self._line.send_bytes(data)
        with self._lock:
            self._moved = time.monotonic()
        return True

    def _wait_for(self, pages: Any) -> None:
        """The step that fills them comes first, which is none of our time and may take any; the other engine hears
        meanwhile that this one lives.
        """
        started = beaten = time.monotonic()
        while not (pages.is_ready() or self._left):
            now = time.monotonic()
            if now - beaten >= self._beat:
                self._line.send(Beat())
                beaten = now
            time.sleep(min(max((now - started) * _POLL_SHARE, _POLL_S), self._beat))
        jax.block_until_ready(pages)
