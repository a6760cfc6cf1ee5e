"""The loop: plan a step, start it, read the one before it."""

from collections import deque

from hex_llm.engine.admission import check_request
from hex_llm.engine.limits import Limits
from hex_llm.engine.output import Output, Stats
from hex_llm.engine.request import FinishReason, Request
from hex_llm.engine.scheduler import Scheduler
from hex_llm.engine.step import PendingStep, Runner, Slice
from hex_llm.errors import EngineDead, RequestError


class Engine:
    """Turns requests into outputs. One thread calls it; a request handed over belongs to it from then on.

    With `max_in_flight` 1 the device computes a step while the next is planned, and results are read one step late;
    with 0 every step is read before the next is planned; more is possible, and ends are noticed later still.

    A step that fails ends the engine, because the device's memory may have gone with it: `step` passes the exception
    on, and from then on there is nothing but EngineDead.
    """

    def __init__(self, runner: Runner, limits: Limits, *, max_in_flight: int = 1):
        self.limits = limits
        self._runner = runner
        self._max_in_flight = max_in_flight
        self._scheduler = Scheduler(limits)
        self._in_flight: deque[tuple[list[Slice], PendingStep]] = deque()
        self._failure: BaseException | None = None  # what a step failed with

    def add(self, request: Request) -> None:
        """Queues a request, or refuses it: RequestError."""
        self._check_alive()
        check_request(request, self.limits)
        if self._scheduler.find(request.id):
            raise RequestError(f"The request id {request.id!r} is in use.", param="request_id")
        self._scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Ends a request at once, without another output. False where it has ended before, which is no error:
        whoever ends a request cannot know what its last step brought. `reason` is STOP for a stop string found.
        """
        request = None if self.is_dead else self._scheduler.find(request_id)
        if request:
            self._scheduler.finish(request, reason)
        return request is not None

    def take_begun(self) -> list[str]:
        """The requests that left the queue since the last call."""
        return self._scheduler.take_begun()

    def step(self) -> list[Output]:
        """Starts the next step, reads the one before, and returns what requests gained by that.

        A KeyboardInterrupt that comes while it waits for the device changes nothing: the next call waits again. One
        that comes while something is half done ends the engine like any other exception.
        """
        self._check_alive()
        waiting = False
        try:
            if not self._start():
                return []
            step, pending = self._in_flight[0]
            waiting = True
            result = pending.read()
            waiting = False
            self._in_flight.popleft()
            return self._scheduler.update(step, result)
        except BaseException as error:
            if not (waiting and isinstance(error, KeyboardInterrupt)):
                self._failure = error
            raise

    def _start(self) -> bool:
        """Plans a step and hands it to the device, unless a read was interrupted and has to come first. Says whether
        the oldest step under way is to be read now.
        """
        step = []
        if len(self._in_flight) <= self._max_in_flight:
            step = self._scheduler.schedule()
            if step:
                self._in_flight.append((step, self._runner.dispatch(step)))
        assert self._in_flight or not self.has_work, "requests are left, and none of them can move"
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
        return bool(self._scheduler.running or self._scheduler.waiting or self._in_flight)

    def stats(self) -> Stats:
        return self._scheduler.stats()

    def check(self) -> None:
        """Asserts that no block and no slot is lost; when idle, that all of them are free."""
        self._scheduler.check()
        if not self.has_work:
            assert self.stats().blocks_used == 0, "an idle engine holds blocks"
