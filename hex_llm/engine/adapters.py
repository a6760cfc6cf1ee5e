"""Which adapter has which of the device's slots, and which are on their way to one.

An adapter is fetched as soon as a request waits for it. When it has come it gets a slot: a free one, or else that of
the adapter with the fewest running requests, and of several such the one that was used least lately. While that still
has any it is closed, which is to say that no other request begins with it, and the slot is taken when the last of them
has ended. It goes by the order of the queue, and nobody loses an adapter to a request behind it. So the first in the
queue gets its slot, however many requests come for others, and keeps it until it has run.

A caller for whom more than half of the slots were filled has others filled in place of those only: however many
adapters it asks for, those of other callers stay, and whoever asks for one of these passes all who wait.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hex_llm.engine.carrier import AdapterHere, Carrier
from hex_llm.engine.output import Stats
from hex_llm.engine.request import Request
from hex_llm.engine.step import Loader


class Adapters:
    """Slots are numbered from 1; 0 is a request's that has no adapter. Without slots there is nothing to do here, and
    neither who loads nor who carries is needed.
    """

    def __init__(self, num_slots: int, loader: Loader | None = None, carrier: Carrier | None = None):
        assert bool(num_slots) == (carrier is not None), "adapters need slots and a carrier"
        self._num_slots = num_slots
        # Where many adapters are waited for, the busiest are to go on: no more than half of all are closed at a time.
        self._most_closed = max(num_slots // 2, 1)
        self._loader = loader
        self._carrier = carrier
        self._free = list(range(num_slots, 0, -1))
        self._slots: OrderedDict[str, int] = OrderedDict()  # by adapter, first the one whose use ended first
        self._callers: dict[str, str] = {}  # who each of those was loaded for
        self._closed: dict[str, str] = {}  # of those, with the callers they are closed for
        self._asked: set[str] = set()  # adapters that have not come yet
        self._staged: dict[str, Any] = {}  # adapters that have come, and have no slot yet
        self._waiting: Counter[str] = Counter()  # requests, by adapter
        self._running: Counter[str] = Counter()
        self._num_loads = 0
        self._num_evictions = 0

    @property
    def are_awaited(self) -> bool:
        """Whether an adapter is on its way that a request waits for."""
        return bool(self._asked)

    def has(self, request: Request) -> bool:
        """Whether a request may begin, as far as its adapter goes."""
        return not request.adapter or (request.adapter in self._slots and request.adapter not in self._closed)

    def wait(self, request: Request) -> None:
        """A request waits, for the first time or again."""
        if request.adapter:
            self._waiting[request.adapter] += 1
            self._ask(request.adapter, request.adapter_source)

    def leave(self, request: Request) -> None:
        """It waits no longer."""
        if request.adapter and _take_one(self._waiting, request.adapter):
            self._staged.pop(request.adapter, None)
            if request.adapter in self._asked:
                assert self._carrier is not None
                self._asked.remove(request.adapter)
                self._carrier.cancel(request.adapter)

    def begin(self, request: Request) -> None:
        """It runs from now on, and its adapter stays where it is."""
        self.leave(request)
        request.adapter_slot = self._slots.get(request.adapter, 0)
        if request.adapter:
            self._running[request.adapter] += 1

    def end(self, request: Request) -> None:
        """It runs no longer."""
        request.adapter_slot = 0
        if request.adapter:
            _take_one(self._running, request.adapter)
            self._slots.move_to_end(request.adapter)

    def stage(self, message: AdapterHere) -> None:
        """An adapter has come. It gets its slot before the next step is planned."""
        if message.identity in self._asked:
            self._asked.remove(message.identity)
            self._staged[message.identity] = message.staged

    def lose(self, identity: str) -> bool:
        """An adapter cannot be had: whoever waits for it is to leave. Says whether it was asked for."""
        was_asked = identity in self._asked
        self._asked.discard(identity)
        return was_asked

    def allot(self, queue: Iterable[Request]) -> None:
        """Loads one of those that have come, given all requests that wait, the oldest first. One, because the next step
        comes after it on the device, and whoever decodes waits for that long.

        Steps under way may still read a slot that is loaded here. They have read it by then: the device does what it
        is given in the order in which it is given, and all those steps were given to it before. And no step that is
        being planned has a slice which reads the slot, because then its request would be running.
        """
        self._closed.clear()
        if not self._staged:
            return
        kept: set[str] = set()  # adapters whose slots are not for those that come next
        may_load = True
        firsts: dict[str, Request] = {}  # the first that waits for each
        for request in queue:
            firsts.setdefault(request.adapter, request)
        firsts.pop("", None)
        for adapter, request in firsts.items():
            if adapter in self._staged and (slot := self._find_slot(request.caller, kept, may_take=may_load)):
                assert self._loader is not None
                self._loader.load_adapter(slot, self._staged.pop(adapter))
                self._slots[adapter], self._callers[adapter] = slot, request.caller
                self._num_loads += 1
                may_load = False
            kept.add(adapter)
            self._ask(adapter, request.adapter_source)  # where it has just lost its slot

    def counted(self, stats: Stats) -> Stats:
        return replace(
            stats,
            adapters=len(self._slots),
            adapters_used=len(self._running),
            adapters_loading=len(self._asked) + len(self._staged),
            total_adapter_loads=self._num_loads,
            total_adapter_evictions=self._num_evictions,
        )

    def check(self, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        """Asserts that slots and requests agree, and that nothing is fetched that nobody waits for."""
        running, waiting = list(running), list(waiting)
        assert sorted([*self._free, *self._slots.values()]) == list(range(1, self._num_slots + 1)), "a slot is lost"
        assert self._running == Counter(each.adapter for each in running if each.adapter), "an adapter is pinned"
        assert self._waiting == Counter(each.adapter for each in waiting if each.adapter), "an adapter is miscounted"
        assert all(each.adapter_slot == self._slots.get(each.adapter, 0) for each in running), "a slot has changed"
        assert all(each.adapter_slot == 0 for each in waiting), "a request has a slot that does not run"
        assert self._closed.keys() <= self._slots.keys() == self._callers.keys()
        places = Counter([*self._slots, *self._asked, *self._staged])
        assert all(count == 1 for count in places.values()), "an adapter is in two places"
        assert self._waiting.keys() | self._running.keys() <= places.keys(), "an adapter is wanted, and not asked for"
        assert self._asked | self._staged.keys() <= self._waiting.keys(), "an adapter is fetched that nobody wants"

    def _ask(self, adapter: str, source: str) -> None:
        if adapter not in self._slots and adapter not in self._asked and adapter not in self._staged:
            assert self._carrier is not None
            self._asked.add(adapter)
            self._carrier.fetch(adapter, source)

    def _find_slot(self, caller: str, kept: set[str], *, may_take: bool) -> int:
        """One to be written to now. Else 0, and one that will be is closed, and kept from those that come next.

        It is found anew for every step. What is closed gains no requests, and another takes its place only where that
        has fewer: therefore it comes to an end. Were anything else to speak for an adapter, such as who waits for it,
        they might change places for ever. Which adapters may give way for the first in the queue does not change while
        it waits: those who load others meanwhile take idle ones, and none of its caller's, or it would have taken them.
        """
        if self._free:
            return self._free.pop() if may_take else 0
        candidates = [each for each in self._slots if each not in kept]
        if 2 * sum(caller in (self._callers[each], self._closed.get(each)) for each in self._slots) > self._num_slots:
            candidates = [each for each in candidates if self._callers[each] == caller]
        victim = min(candidates, key=self._running.__getitem__, default="")
        if not victim:
            return 0
        if may_take and not self._running[victim]:
            self._num_evictions += 1
            del self._callers[victim]
            return self._slots.pop(victim)
        if len(self._closed) < self._most_closed:
            self._closed[victim] = caller
            kept.add(victim)
        return 0


def _take_one(counts: Counter[str], name: str) -> bool:
    """Says whether it was the last: nothing is left then, not even a zero."""
    counts[name] -= 1
    if counts[name]:
        return False
    del counts[name]
    return True
