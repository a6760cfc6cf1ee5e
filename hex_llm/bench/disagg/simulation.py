"""The workers of a setting, the requests that come to them, and what becomes of those, event by event."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hex_llm.bench.disagg.load import Load, Request, draw_requests
from hex_llm.bench.disagg.rates import Rates, chunked_steps, split_steps, whole_steps
from hex_llm.bench.disagg.worker import Step, Worker
from hex_llm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Setting:
    """Which workers there are: some that do everything, or some for prompts and some for decoding."""

    plain: int = 0
    prefill: int = 0
    decode: int = 0
    chunked: bool = True

    def __str__(self) -> str:
        if self.prefill:
            return f"{self.prefill},{self.decode}"
        return "plain, chunked" if self.chunked else "plain, whole prompts"


@dataclass(frozen=True, slots=True)
class Run:
    """What became of the requests, in the order in which they were sent, and what each side's workers did."""

    requests: Sequence[Request]
    sides: Sequence[Sequence[Worker]]  # those that do all, or those for prompts and those for decoding


def simulate(setting: Setting, rates: Rates, load: Load) -> Run:
    requests = draw_requests(load)
    for request in requests:
        if request.prompt + request.answer > rates.bounds.kv_tokens:
            raise ConfigError(
                f"A request of {request.prompt} and {request.answer} tokens does not fit --kv_tokens="
                f"{rates.bounds.kv_tokens}; --max_model_len limits what is drawn."
            )
    return run_requests(setting, rates, requests, load.concurrency)


def run_requests(setting: Setting, rates: Rates, requests: Sequence[Request], concurrency: int | None = None) -> Run:
    simulation = _Simulation(setting, rates, requests, concurrency or len(requests))
    simulation.run()
    return Run(requests, simulation.sides)


class _Simulation:
    def __init__(self, setting: Setting, rates: Rates, requests: Sequence[Request], concurrency: int):
        self._rates = rates
        self._events: list[tuple[float, int, Callable[[float], None]]] = []  # a heap
        self._num_events = 0
        self._num_sent = 0
        self._free = concurrency  # requests that may still be sent
        self._due: deque[Request] = deque()  # that have to wait for one to end
        self._source: dict[int, Worker] = {}  # of the requests that are handed over, by number
        self._target: dict[int, Worker] = {}
        if setting.prefill:
            steps = split_steps(rates.bounds)
            self._entry = [Worker(rates, steps, hands_over=True, on_begin=self._offer) for _ in range(setting.prefill)]
            self._decoders = [Worker(rates, steps, on_reserve=self._reserve) for _ in range(setting.decode)]
            self.sides = (self._entry, self._decoders)
        else:
            steps = chunked_steps(rates.bounds) if setting.chunked else whole_steps(rates.bounds)
            self._entry = [Worker(rates, steps) for _ in range(setting.plain)]
            self.sides = (self._entry,)
        for request in requests:
            self._at(request.arrival_s, lambda now, request=request: self._arrive(request, now))

    def run(self) -> None:
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, happen))

    def _arrive(self, request: Request, now: float) -> None:
        if not self._free:
            self._due.append(request)
            return
        self._free -= 1
        request.arrival_s = now
        self._send(
            request, min(self._entry, key=lambda each: (each.outstanding, each.num_requests, each.last_sent)), now
        )

    def _send(self, request: Request, worker: Worker, now: float) -> None:
        self._num_sent += 1
        worker.last_sent = self._num_sent
        worker.add(request)
        self._wake(worker, now)

    def _wake(self, worker: Worker, now: float) -> None:
        """A worker with a step under way waits for that, and looks then."""
        if not worker.in_flight:
            self._go_on(worker, now)

    def _go_on(self, worker: Worker, now: float) -> None:
        """One step runs, and the next is planned."""
        while worker.in_flight < 2 and (step := worker.plan(now)) is not None:
            worker.in_flight += 1
            self._at(step.end_s, lambda now, step=step: self._read(worker, step, now))

    def _read(self, worker: Worker, step: Step, now: float) -> None:
        worker.in_flight -= 1
        worker.read(step)
        for request, length in step.slices:
            if self._source.get(request.number) is worker:
                request.unsent += length
                self._carry(request, now)
        for request in step.finished:
            if request.output == request.answer:
                self._end(now)
        self._go_on(worker, now)

    def _end(self, now: float) -> None:
        self._free += 1
        if self._due:
            self._arrive(self._due.popleft(), now)

    def _offer(self, source: Worker, request: Request, now: float) -> None:
        """A worker has begun with a prompt: from now on another one may ask for its pages."""
        if request.answer == 1:
            return
        request.fetches = True
        self._source[request.number] = source
        self._send(request, min(self._decoders, key=lambda each: (each.used + each.queued, each.last_sent)), now)

    def _reserve(self, target: Worker, request: Request, now: float) -> None:
        self._target[request.number] = target
        self._carry(request, now)

    def _carry(self, request: Request, now: float) -> None:
        """Sends what is computed, once there is room for it."""
        source, target = self._source[request.number], self._target.get(request.number)
        if target is None or not request.unsent:
            return
        start = max(now, source.link_free_s, target.link_free_s)
        end = start + self._rates.link.seconds(request.unsent)
        source.link_free_s = target.link_free_s = end
        request.sent += request.unsent
        request.unsent = 0
        if request.sent == request.prompt:
            self._at(end, lambda now: self._complete(request, now))

    def _complete(self, request: Request, now: float) -> None:
        request.complete_s = now
        source, target = self._source.pop(request.number), self._target.pop(request.number)
        target.join(request)
        source.give_back(request)
        self._wake(target, now)
        self._wake(source, now)
