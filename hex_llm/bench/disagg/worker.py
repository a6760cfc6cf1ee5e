"""One engine on a clock of its own: what hex_llm/engine/scheduler.py would plan, and how long that would take.

Sequences that decode do so together, so a step of them is a few sums however many they are: the worker counts its
decode steps (`ticks`), and a request knows which of them is its last.

Kept of the scheduler: first come, first served; a step is planned when the one before the last has been read; memory
that runs out is taken from the youngest, which is computed again. Left out: memory comes in tokens, not in blocks;
there is no prefix cache; every answer ends where the engine knows that it will.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hex_llm.bench.disagg.load import Request
from hex_llm.bench.disagg.rates import Rates, Steps


@dataclass(slots=True)
class Step:
    """What was planned, for when it is read."""

    start_s: float = 0.0
    end_s: float = 0.0
    decodes: int = 0
    slices: list[tuple[Request, int]] = field(default_factory=list)  # of prompts, and how many tokens
    seen: float = 0.0  # pairs of a slice's token and one that it sees
    sampled: list[Request] = field(default_factory=list)  # whose prompt is complete with this step
    finished: list[Request] = field(default_factory=list)
    tokens: int = 0  # that still fit


@dataclass(frozen=True, slots=True)
class Gap:
    """So many tokens came at `end_s`, each so long after the one before it."""

    end_s: float
    seconds: float
    count: int


class Worker:
    """`plan` makes the next step, and `read` has to be called when its time has come.

    `on_begin` hears of requests whose prompt is begun, `on_reserve` of those that have room for pages to come.
    """

    def __init__(
        self,
        rates: Rates,
        steps: Steps,
        *,
        hands_over: bool = False,
        on_begin: "Callable[[Worker, Request, float], None] | None" = None,
        on_reserve: "Callable[[Worker, Request, float], None] | None" = None,
    ):
        self.rates = rates
        self.in_flight = 0  # steps
        self.outstanding = 0  # tokens that are still to be computed, as a router counts them
        self.num_requests = 0
        self.last_sent = 0
        self.link_free_s = 0.0
        self.used = 0  # tokens in memory
        self.queued = 0  # tokens of prompts that wait for memory
        self.gaps: list[Gap] = []
        self.busy: list[tuple[float, float]] = []
        self._steps = steps
        self._hands_over = hands_over
        self._on_begin = on_begin
        self._on_reserve = on_reserve
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}  # what has a slot, oldest first
        self._partial: Request | None = None  # the one whose prompt the last step did not complete
        self._rows = 0  # that decode
        self._context = 0  # tokens of theirs in memory
        self._ticks = 0
        self._ends: list[tuple[int, int, Request]] = []  # a heap
        self._joined: list[Request] = []  # rows whose last token did not come with the decode step before
        self._last_decode_s = math.nan
        self._retiring = 0  # tokens in memory that steps under way give back
        self._free_s = 0.0  # when the device has done all that is planned

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        self.queued += request.prompt
        self.num_requests += 1
        self.outstanding += self._work(request)

    def join(self, request: Request) -> None:
        """The pages of a request have come for which there was room."""
        request.fetches = False
        self._start_decoding(request)

    def give_back(self, request: Request) -> None:
        """Another worker has taken a request's pages."""
        self.used -= request.prompt

    def plan(self, now: float) -> Step | None:
        step = Step(start_s=max(now, self._free_s))
        if self._steps.chunked:
            self._make_room()
            step.tokens = (self._steps.mixed_tokens if self._rows else self._steps.tokens) - self._rows
            self._prefill(step, now)
            self._decode(step)
        else:
            step.tokens = self._steps.tokens
            self._prefill(step, now)
            if not step.slices:
                self._make_room()
                self._decode(step)
        if not step.slices and not step.decodes:
            return None
        self._time(step)
        return step

    def read(self, step: Step) -> None:
        self.outstanding -= step.decodes + len(step.sampled)
        self.outstanding -= sum(request.prompt for request in step.sampled if request.first_s == step.end_s)
        for request in step.finished:
            del self._running[request.number]
            self.num_requests -= 1
            if not self._hands_over or request.answer == 1:
                self.used -= request.prompt + request.answer - 1
                self._retiring -= request.prompt + request.answer - 1

    def _work(self, request: Request) -> int:
        """Tokens that are computed here of a request that comes."""
        if self._hands_over:
            return request.prompt + 1
        return request.answer - 1 if request.fetches else request.prompt + request.answer

    def _make_room(self) -> None:
        """For a token more of every row."""
        while self._rows and self.used - self._retiring + self._rows > self.rates.bounds.kv_tokens:
            youngest = next(
                each
                for each in reversed(self._running.values())
                if each.end_tick > self._ticks or each is self._partial
            )
            self._preempt(youngest)

    def _preempt(self, request: Request) -> None:
        if request is self._partial:
            self._partial = None
            self.used -= request.prompt + request.output
        else:
            request.output = request.answer - (request.end_tick - self._ticks)
            request.end_tick = -1
            if request in self._joined:
                self._joined.remove(request)
            else:
                request.last_s = self._last_decode_s
            self._rows -= 1
            self._context -= _held(request)
            self.used -= _held(request)
        del self._running[request.number]
        request.preemptions += 1
        request.computed = 0
        self._waiting.appendleft(request)
        self.queued += request.prompt

    def _prefill(self, step: Step, now: float) -> None:
        """Goes on with the prompt that was begun, and admits what waits."""
        prefills = self._steps.prefills
        if self._partial is not None:
            self._slice(step, self._partial)
            prefills -= 1
        while self._waiting and len(self._running) < self.rates.bounds.max_decode_seqs:
            request = self._waiting[0]
            size = request.prompt + (0 if request.fetches else request.output)
            if self.used + size + len(self._running) > self.rates.bounds.kv_tokens:
                break
            if not request.fetches and not (prefills and step.tokens):
                break
            self._waiting.popleft()
            self.queued -= request.prompt
            self._running[request.number] = request
            self.used += size
            if request.fetches:
                if self._on_reserve:
                    self._on_reserve(self, request, now)
                continue
            if self._on_begin:
                self._on_begin(self, request, now)
            self._slice(step, request)
            prefills -= 1

    def _slice(self, step: Step, request: Request) -> None:
        size = request.prompt + request.output
        length = min(size - request.computed, step.tokens)
        step.slices.append((request, length))
        step.seen += length * (request.computed + length / 2)
        step.tokens -= length
        request.computed += length
        if request.computed == size:
            step.sampled.append(request)
            self._partial = None
        else:
            self._partial = request

    def _decode(self, step: Step) -> None:
        step.decodes = self._rows
        if step.decodes:
            self._ticks += 1
            self._context += self._rows
            self.used += self._rows

    def _time(self, step: Step) -> None:
        """Works out when a step ends, and notes the tokens that it brings."""
        times, length = self.rates.times, sum(length for _, length in step.slices)
        if not step.slices:
            seconds = times.decode(step.decodes, self._context)
        else:
            tokens = self._steps.padded(step.decodes + length) - step.decodes
            if step.decodes:
                seconds = times.mixed(step.decodes, self._context, tokens, step.seen)
            else:
                seconds = times.prefill(tokens, step.seen)
        self._free_s = step.end_s = step.start_s + seconds
        self.busy.append((step.start_s, step.end_s))
        if step.decodes:
            self._note_decodes(step)
        for request in step.sampled:
            self._note_sampled(step, request)

    def _note_decodes(self, step: Step) -> None:
        end = step.end_s
        if together := step.decodes - len(self._joined):
            self.gaps.append(Gap(end, end - self._last_decode_s, together))
        self.gaps += [Gap(end, end - request.last_s, 1) for request in self._joined]
        self._joined.clear()
        self._last_decode_s = end
        while self._ends and self._ends[0][0] <= self._ticks:
            tick, _, request = heapq.heappop(self._ends)
            if request.end_tick == tick:  # else it gave way since, or stands here twice because of that
                request.output, request.last_s, request.end_tick = request.answer, end, -1
                self._rows -= 1
                self._context -= _held(request)
                self._finish(step, request)

    def _note_sampled(self, step: Step, request: Request) -> None:
        if request.output == 0:
            request.first_s = step.end_s
        else:
            self.gaps.append(Gap(step.end_s, step.end_s - request.last_s, 1))
        request.output += 1
        request.last_s = step.end_s
        if request.output == request.answer or self._hands_over:
            self._finish(step, request)
        else:
            self._start_decoding(request)

    def _start_decoding(self, request: Request) -> None:
        request.end_tick = self._ticks + request.answer - request.output
        heapq.heappush(self._ends, (request.end_tick, request.number, request))
        self._rows += 1
        self._context += _held(request)
        self._joined.append(request)

    def _finish(self, step: Step, request: Request) -> None:
        step.finished.append(request)
        if not self._hands_over or request.answer == 1:
            self._retiring += _held(request)


def _held(request: Request) -> int:
    """Tokens in memory of a request that decodes: all but the last of the answer."""
    return request.prompt + request.output - 1
