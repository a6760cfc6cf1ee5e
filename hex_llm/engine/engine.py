"""The loop: plan a step, start it, read the one before it."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from hex_llm import faults
from hex_llm.engine.adapters import Adapters
from hex_llm.engine.admission import check_request
from hex_llm.engine.carrier import AdapterHere, AdapterLost, Carrier, FromCarrier
from hex_llm.engine.handover import FromPorter, Porter
from hex_llm.engine.handovers import Handovers
from hex_llm.engine.limits import Limits
from hex_llm.engine.output import Output, Stats
from hex_llm.engine.request import FinishReason, Request
from hex_llm.engine.scheduler import Scheduler
from hex_llm.engine.step import Copier, Loader, OutOfDeviceMemory, PendingStep, Runner, Slice, Spoiler
from hex_llm.errors import EngineDead, OutOfMemory, RequestError

logger = logging.getLogger(__name__)

_REBUILD_S = 600.0  # from one step that found no memory to the next for which all is computed again


class Engine:
    """Turns requests into outputs. One thread calls it; a request handed over belongs to it from then on.

    With `max_in_flight` 1 the device computes a step while the next is planned, and results are read one step late;
    with 0 every step is read before the next is planned; more is possible, and ends are noticed later still.

    A step that fails ends the engine, because the device's memory may have gone with it: `step` passes the exception
    on, and from then on there is nothing but EngineDead. With `rebuilds`, one that finds no memory on the device does
    not: what runs is computed again, from nothing, unless that was done not long before.

    With a porter, and a runner that is also a `Copier`, it can hand requests over to other engines and take them over;
    whoever owns it passes on to `hear` what the porter says. With a carrier, and a runner that is also a `Loader`, it
    serves requests that name adapters, and the same goes for what the carrier says.
    """

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        *,
        max_in_flight: int = 1,
        rebuilds: bool = False,
        porter: Porter | None = None,
        carrier: Carrier | None = None,
    ):
        self.limits = limits
        self._runner = runner
        self._max_in_flight = max_in_flight
        self._adapters = Adapters(limits.num_adapters, cast(Loader, runner), carrier)
        self._scheduler = Scheduler(limits, self._adapters)
        self._in_flight: deque[tuple[list[Slice], PendingStep]] = deque()
        self._rebuilds = rebuilds and porter is None  # other engines may be fetching blocks from this one's memory
        self._rebuilt_at = -math.inf
        self._num_ooms = 0
        self._failure: BaseException | None = None  # what a step failed with
        self._handovers: Handovers | None = None
        if porter is not None:
            self._handovers = Handovers(cast(Copier, runner), self._scheduler, porter)
        # Called again and again while another engine may ask for blocks, which are not to wait for the step under way.
        self.while_waiting: Callable[[], None] = lambda: None
        self.is_stuck = False  # the last `step` had nothing to do: all that is here waits for others

    def add(self, request: Request) -> None:
        """Queues a request, or refuses it: RequestError."""
        self._check_alive()
        check_request(request, self.limits)
        if self._scheduler.find(request.id):
            raise RequestError(f"The request id {request.id!r} is in use.", param="request_id")
        if self._handovers is not None:
            self._handovers.add(request)
        elif request.hands_over or request.source:
            raise RequestError("This engine neither hands requests over nor takes them over.")
        self._scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Ends a request at once, without another output. False where it has ended before, which is no error:
        whoever ends a request cannot know what its last step brought. `reason` is STOP for a stop string found.
        """
        if self.is_dead:
            return False
        request = self._scheduler.find(request_id)
        was_held = self._handovers is not None and self._handovers.abort(request_id)
        if request is not None:
            self._scheduler.finish(request, reason)
        return was_held or request is not None

    def hear(self, message: FromPorter | FromCarrier) -> Sequence[str]:
        """Takes in what the porter or the carrier says; returns the requests that have ended for want of an adapter."""
        self._check_alive()
        with self._ending():
            match message:
                case AdapterHere():
                    self._adapters.stage(message)
                case AdapterLost(identity):
                    return self._end_without(identity)
                case _:
                    assert self._handovers is not None, "there is no porter"
                    self._handovers.hear(message)
        return ()

    def expire(self, now: float) -> list[str]:
        """Gives up requests that were handed over and that no engine has taken for long."""
        return [] if self._handovers is None or self.is_dead else self._handovers.expire(now)

    def take_begun(self) -> list[str]:
        """The requests that left the queue since the last call."""
        return self._scheduler.take_begun()

    def step(self) -> list[Output]:
        """Starts the next step, reads the one before, and returns what requests gained by that.

        A KeyboardInterrupt that comes while it waits for the device changes nothing: the next call waits again. One
        that comes while something is half done ends the engine like any other exception.
        """
        self._check_alive()
        try:
            return self._step()
        except OutOfDeviceMemory as error:
            with self._ending():
                self._rebuild(error)
            return []

    def _step(self) -> list[Output]:
        with self._ending(OutOfDeviceMemory):
            if not self._start():
                return []
            step, pending = self._in_flight[0]
        with self._ending(KeyboardInterrupt, OutOfDeviceMemory):
            while self._handovers is not None and self._handovers.may_be_asked and not pending.is_done():
                self.while_waiting()
            result = pending.read()
        with self._ending():
            self._in_flight.popleft()
            outputs = self._scheduler.update(step, result)
            if self._handovers is not None:
                self._handovers.read(outputs)
            return outputs

    def _rebuild(self, error: OutOfDeviceMemory) -> None:
        """Begins again with all requests that run, and an empty cache: what the device had may have been given to the
        step that failed.
        """
        self._num_ooms += 1
        since = time.monotonic() - self._rebuilt_at
        if not self._rebuilds:
            raise OutOfMemory(f"A step found no memory on the device: {error}") from error
        if since < _REBUILD_S:
            raise OutOfMemory(
                f"A step found no memory on the device, {since:.0f} s after another had found none; once in"
                f" {_REBUILD_S:.0f} s is borne. A smaller --hbm_utilization_factor leaves more room: {error}"
            ) from error
        logger.error("A step found no memory on the device; all that runs is computed again. %s", error)
        self._rebuilt_at = time.monotonic()
        self._in_flight.clear()
        try:
            self._runner.reset()
        except OutOfDeviceMemory as again:
            raise OutOfMemory(f"The device has no memory for the KV cache any more: {again}") from again
        self._scheduler.restart()
        self.is_stuck = False  # as it may have been before the step that failed

    def _end_without(self, adapter: str) -> list[str]:
        """Ends the requests that wait for an adapter which cannot be had."""
        if not self._adapters.lose(adapter):
            return []
        ended = [each.id for each in self._scheduler.waiting.values() if each.adapter == adapter]
        for request_id in ended:
            self.abort(request_id)
        return ended

    @contextmanager
    def _ending(self, *but: type[BaseException]) -> Iterator[None]:
        """What goes wrong within ends the engine, but for these."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, but):
                self._failure = error
            raise

    def _start(self) -> bool:
        """Plans a step and hands it to the device, unless a read was interrupted and has to come first. Says whether
        the oldest step under way is to be read now.
        """
        step = []
        if len(self._in_flight) <= self._max_in_flight:
            faults.reach("engine.step")
            if faults.reach("engine.preempt"):
                self._scheduler.preempt_youngest()
            if faults.reach("device.blocks"):
                cast(Spoiler, self._runner).spoil(self._scheduler.pool.empty)
            step = self._scheduler.schedule()
            if step:
                self._in_flight.append((step, self._runner.dispatch(step)))
            if self._handovers is not None:
                self._handovers.start(step)
        self.is_stuck = not self._in_flight
        if self.is_stuck and self.has_work:
            assert self.waits_for_others, "requests are left, and none of them can move"
        return bool(self._in_flight) and (not step or len(self._in_flight) > self._max_in_flight)

    def _check_alive(self) -> None:
        if self._failure is not None:
            said = str(self._failure).strip().split("\n")[0][:200]
            name = type(self._failure).__name__
            raise EngineDead(
                f"The engine stopped when a step failed with {name}{said and f': {said}'}; it must be started again."
            ) from self._failure

    @property
    def is_dead(self) -> bool:
        """Whether a step has failed."""
        return self._failure is not None

    @property
    def has_work(self) -> bool:
        """Whether there is a request that another engine is not busy with."""
        scheduler = self._scheduler
        return bool(self._in_flight or scheduler.waiting or len(scheduler.running) > len(scheduler.coming))

    @property
    def waits_for_others(self) -> bool:
        """Whether blocks are on their way from or to another engine, or an adapter is to this one."""
        return bool(self._scheduler.coming or self._scheduler.held or self._adapters.are_awaited)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is here of any request."""
        return not (self.has_work or self.waits_for_others)

    def stats(self) -> Stats:
        stats = replace(self._adapters.counted(self._scheduler.stats()), total_ooms=self._num_ooms)
        return stats if self._handovers is None else self._handovers.counted(stats)

    def check(self) -> None:
        """Asserts that no block and no slot is lost; when idle, that all of them are free and no adapter is in use."""
        self._scheduler.check()
        if self.is_idle:
            assert self.stats().blocks_used == 0, "an idle engine holds blocks"
