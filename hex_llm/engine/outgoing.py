"""Requests whose blocks go to another engine: what of them is computed, what was sent, and for how long they wait."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hex_llm.engine.handover import PARTS_IN_FLIGHT, Part, Porter
from hex_llm.engine.limits import Limits
from hex_llm.engine.request import Request
from hex_llm.engine.step import Copier, Slice

HOLD_S = 300.0  # that blocks are kept for an engine that does not take them


@dataclass(slots=True)
class _Outgoing:
    """Of `blocks`, the first `num_ready` have been computed, or will be when the steps under way have run."""

    request: Request
    blocks: Sequence[int] = ()
    num_ready: int = 0
    next: int = 0  # the block to be sent next, where somebody asks
    early: deque[Part] = field(default_factory=deque)  # that were copied before, without a gap
    token: int | None = None  # the one after the blocks, once it is known
    since: float = field(default_factory=time.monotonic)  # when anything was last heard of it

    @property
    def has_blocks(self) -> bool:
        """Not while it was preempted: others have them then."""
        return self.request.slot >= 0 or self.request.finish_reason is not None


class Outgoing:
    """Sends blocks as soon as the step that fills them has been handed to the device: the copy is made after it, and
    beside the next one it is carried away. Who has not asked by then will do so soon, but the next step is handed over
    sooner, and what the device copies after that waits for it. So a few parts are copied before they are asked for.
    """

    def __init__(self, copier: Copier, limits: Limits, porter: Porter):
        self._copier = copier
        self._limits = limits
        self._porter = porter
        self._requests: dict[str, _Outgoing] = {}
        self._asked: dict[str, _Outgoing] = {}  # of those: another engine waits for more of them
        self._num_early = 0  # parts

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.id] = _Outgoing(request)

    def note(self, step: Sequence[Slice]) -> None:
        """A step has been handed to the device."""
        size = self._limits.block_size
        for piece in step:
            if piece.request.hands_over and (found := self._requests.get(piece.request.id)):
                end = piece.start + piece.length
                found.blocks = tuple(piece.request.blocks)
                found.num_ready = -(-end // size) if piece.samples else end // size
                if piece.request.id not in self._asked:
                    self._copy_early(found, piece.start // size)
        self.send()

    def want(self, request_id: str, first: int) -> None:
        """Another engine asks, perhaps one after another that has gone."""
        found = self._requests.get(request_id)
        if found is None:
            self._porter.refuse(request_id, "its blocks are not here")
        else:
            found.next, found.since = first, time.monotonic()
            self._asked[request_id] = found
            self.send()

    def leave(self, request_id: str) -> None:
        """Nobody asks any more; another may."""
        if found := self._asked.pop(request_id, None):
            found.since = time.monotonic()

    def end_prompt(self, request_id: str, token: int) -> None:
        if found := self._requests.get(request_id):
            found.token, found.since = token, time.monotonic()
            self.send()

    def forget(self, request_id: str, reason: str = "") -> None:
        """It has been taken, or will not be: then whoever asks is told the reason."""
        if found := self._requests.pop(request_id, None):
            self._num_early -= len(found.early)
        if self._asked.pop(request_id, None) and reason:
            self._porter.refuse(request_id, reason)

    def expired(self, now: float) -> list[str]:
        """Those that have been complete for long, and nobody has taken."""
        return [name for name, each in self._requests.items() if each.token is not None and now - each.since > HOLD_S]

    def send(self) -> None:
        """What is there and asked for, as far as there is room."""
        for request_id, each in list(self._asked.items()):
            while each.has_blocks and each.next < each.num_ready and self._porter.has_room(request_id):
                part = self._next_part(each)
                self._porter.send(part)
                each.next, each.since = part.first + part.count, time.monotonic()
            if each.token is not None and each.next >= each.num_ready:
                self._porter.finish(request_id, each.token, each.num_ready)
                del self._asked[request_id]

    def _next_part(self, each: _Outgoing) -> Part:
        while each.early and each.early[0].first < each.next:  # who asks has some of it
            self._take_early(each)
        if not each.early:
            return self._copy(each, each.next, each.num_ready)
        first = each.early[0].first
        return self._take_early(each) if first == each.next else self._copy(each, each.next, min(first, each.num_ready))

    def _copy(self, each: _Outgoing, first: int, stop: int) -> Part:
        stop = min(first + self._copier.part_blocks, stop)
        return Part(each.request.id, first, stop - first, self._copier.copy_out(each.blocks[first:stop]))

    def _copy_early(self, each: _Outgoing, first: int) -> None:
        """What was computed from block `first` on, after what was copied before."""
        if each.early:
            first = each.early[-1].first + each.early[-1].count
        while first < each.num_ready and self._num_early < PARTS_IN_FLIGHT:
            part = self._copy(each, first, each.num_ready)
            each.early.append(part)
            self._num_early += 1
            first += part.count

    def _take_early(self, each: _Outgoing) -> Part:
        self._num_early -= 1
        return each.early.popleft()
