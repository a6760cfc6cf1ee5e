"""The side of a Porter whose engine goes on with requests: what is being fetched, from where, and how far it is."""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from hex_llm.engine.handover import PARTS_IN_FLIGHT, Came, Complete, FromPorter, Lost, Part
from hex_llm.transfer.source import Source
from hex_llm.transfer.staging import Staging, num_bytes
from hex_llm.transfer.words import Ask, Done, Drop

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Fetch:
    """A request's blocks, which come in order and without a gap."""

    number: int
    request_id: str
    source: Source
    next: int  # the block that is to come next
    heard: float  # when anything last came of it
    seconds: float = 0.0  # that its parts took to be carried
    token: int = 0
    token_came: float = 0.0
    end: int | None = None  # the block after the last; known with the token
    coming: int = 0  # 1 while a part of it is on its way to the device
    # Parts that the engine has not taken yet, by their first block: the identity of each, since one of the same blocks
    # may have come of an earlier fetch of the request, and be given back only now.
    landed: dict[int, int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.next == self.end


class Fetching:
    """The lock is held while `tell` is called, so that nothing is told of a request after it was cancelled."""

    def __init__(
        self, connect: Callable[[str, "Fetching"], Source], staging: Staging, *, tell: Callable[[FromPorter], None],
        patience: float,
    ):  # fmt: skip
        self._connect = connect
        self._staging = staging
        self._tell = tell
        self._patience = patience
        self._changed = threading.Condition(threading.RLock())
        self._sources: dict[str, Source] = {}
        self._fetches: dict[int, Fetch] = {}  # by number
        self._numbers: dict[str, int] = {}  # by request
        self._new_numbers = itertools.count()

    def fetch(self, request_id: str, address: str, first: int) -> None:
        with self._changed:
            self.cancel(request_id)
            source = self._sources.get(address)
            if source is None:
                source = self._sources[address] = self._connect(address, self)
            number, now = next(self._new_numbers), time.monotonic()
            self._fetches[number] = Fetch(number, request_id, source, first, heard=now)
            self._numbers[request_id] = number
            source.say(Ask(number, request_id, first))

    def took(self, part: Part) -> None:
        with self._changed:
            number = self._numbers.get(part.request_id)
            landed = self._fetches[number].landed if number is not None else {}
            if landed.get(part.first) == id(part):
                del landed[part.first]
                self._changed.notify_all()

    def acknowledge(self, request_id: str) -> None:
        with self._changed:
            fetch = self._forget(self._numbers.get(request_id))
            if fetch is not None:
                fetch.source.say(Done(fetch.number))

    def cancel(self, request_id: str) -> None:
        with self._changed:
            fetch = self._forget(self._numbers.get(request_id))
            if fetch is not None:
                fetch.source.say(Drop(fetch.number))

    def close(self) -> None:
        with self._changed:
            for source in self._sources.values():
                source.close()

    def expects(self, number: int, first: int) -> bool:
        with self._changed:
            fetch = self._fetches.get(number)
            if fetch is None:
                return False
            if first != fetch.next:
                self._lose(fetch, f"Its block {first} came, and block {fetch.next} was to come.")
                return False
            ended = fetch.source.ended
            self._changed.wait_for(
                lambda: self._num_landed() < PARTS_IN_FLIGHT or number not in self._fetches or ended.is_set()
            )
            if number not in self._fetches or ended.is_set():
                return False
            fetch.coming = 1
            return True

    def wake(self) -> None:
        """A source has ended."""
        with self._changed:
            self._changed.notify_all()

    def wants(self, number: int) -> bool:
        with self._changed:
            return number in self._fetches

    def came(self, number: int, count: int, pages: jax.Array, seconds: float) -> None:
        with self._changed:
            fetch = self._fetches.get(number)
            if fetch is None:
                return
            part = Part(fetch.request_id, fetch.next, count, pages)
            fetch.coming = 0
            fetch.next += count
            fetch.seconds += seconds
            fetch.heard = time.monotonic()
            fetch.landed[part.first] = id(part)
            self._tell(Came(part, num_bytes(self._staging, count)))
            self._check_complete(fetch)

    def finished(self, number: int, token: int, end: int) -> None:
        with self._changed:
            fetch = self._fetches.get(number)
            if fetch is None or fetch.end is not None:
                return
            fetch.token, fetch.end = token, end
            fetch.heard = fetch.token_came = time.monotonic()
            self._check_complete(fetch)

    def refused(self, number: int, reason: str) -> None:
        with self._changed:
            fetch = self._forget(number)
            if fetch is not None and not fetch.is_complete:
                self._tell(Lost(fetch.request_id, reason))

    def tick(self, source: Source) -> None:
        """Gives up what nothing comes of, though the source lives."""
        with self._changed:
            late = time.monotonic() - self._patience
            for fetch in [*self._fetches.values()]:
                if fetch.source is source and fetch.heard < late and not fetch.is_complete and not fetch.coming:
                    self._lose(fetch, f"None of its blocks has come for {self._patience:g} s.")

    def gone(self, source: Source, reason: str) -> None:
        with self._changed:
            if self._sources.get(source.address) is source:
                del self._sources[source.address]
            # Of those that are complete all is here, and only the engine's word about it is missing.
            lost = [each for each in self._fetches.values() if each.source is source and not each.is_complete]
            if lost:
                logger.warning("%s It had %d requests.", reason, len(lost))
            for fetch in lost:
                self._forget(fetch.number)
                self._tell(Lost(fetch.request_id, reason))

    def _check_complete(self, fetch: Fetch) -> None:
        if fetch.end is not None and fetch.next > fetch.end:
            self._lose(fetch, f"Its block {fetch.next - 1} came, and it has {fetch.end}.")
        elif fetch.is_complete:
            exposed = time.monotonic() - fetch.token_came
            self._tell(Complete(fetch.request_id, fetch.token, fetch.seconds, exposed))

    def _num_landed(self) -> int:
        return sum(fetch.coming + len(fetch.landed) for fetch in self._fetches.values())

    def _lose(self, fetch: Fetch, reason: str) -> None:
        logger.warning("The blocks of request %s are not fetched any further. %s", fetch.request_id, reason)
        self._forget(fetch.number)
        fetch.source.say(Drop(fetch.number))
        self._tell(Lost(fetch.request_id, reason))

    def _forget(self, number: int | None) -> Fetch | None:
        """Its parts that have come count no longer: if they are not taken yet they never will be."""
        fetch = self._fetches.pop(number, None) if number is not None else None
        if fetch is not None:
            del self._numbers[fetch.request_id]
            self._changed.notify_all()
        return fetch
