"""The engine processes of a server: starts all of them, and starts an engine again that has ended.

Whoever owns it calls `poll` all the time. It blocks for no longer than the start of a process takes.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from hex_llm.config import Config
from hex_llm.errors import StartError
from hex_llm.launch.launcher import Child, Launcher
from hex_llm.launch.placement import Replica, Seat
from hex_llm.launch.task import EngineTask, Task
from hex_llm.process import ENGINE_DIED

logger = logging.getLogger(__name__)

POLL_S = 0.1  # between two calls of `poll`
_STOP_S = 5.0  # that engines have to end when nobody is connected to them any more
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # before a replica is started again
_GOOD_LIFE_S = 300.0  # after which a death has nothing to do with the one before


class Fleet:
    """`exit_code` is set once it is given up: where there is one replica, as soon as that has ended; where there are
    more, when one cannot start at all. `fronts` are the addresses at which the HTTP processes listen for engines.
    """

    def __init__(
        self,
        config: Config,
        launcher: Launcher,
        placement: Sequence[Replica],
        fronts: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ):
        self.exit_code: int | None = None
        self._config = config
        self._launcher = launcher
        self._fronts = tuple(fronts)
        self._environment = environment or {}
        self._crews = _crews(config, placement)
        try:
            for crew in self._crews:
                self._start(crew)
        except BaseException:
            self._end()
            raise

    def poll(self, *, restart: bool = True) -> None:
        """Looks for processes that have ended. Without `restart` they stay so: the server is about to end itself."""
        now = time.monotonic()
        for crew in self._crews:
            if crew.children and (ended := crew.ended()):
                self._lose(crew, *ended, now=now, restart=restart)
            elif restart and self.exit_code is None and now >= crew.start_at and crew.is_gone():
                self._try_again(crew)

    def end(self, replica: int) -> None:
        """Has the processes of a replica that hangs end; `poll` sees to the rest."""
        for crew in self._crews:
            for child in crew.children if replica in crew.engines else ():
                child.end()

    def close(self) -> None:
        """To be called when the HTTP processes have closed their connections, which ends engines in order."""
        deadline = time.monotonic() + _STOP_S
        children = [child for crew in self._crews for child in crew.children]
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._end()

    def _end(self) -> None:
        for crew in self._crews:
            crew.end()
        deadline = time.monotonic() + _STOP_S
        while not all(crew.is_gone() for crew in self._crews) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._launcher.close()

    def _start(self, crew: "_Crew") -> None:
        ranks = len(crew.seats)
        host = crew.seats[0].host
        steps = coordinator = ""
        if ranks > 1:
            steps, coordinator = self._launcher.addresses(host, 2)
        crew.started = time.monotonic()
        crew.num_starts += 1
        for rank, seat in enumerate(crew.seats):
            task = Task(
                engines=tuple(self._engine_task(number, devices, host) for number, devices in crew.engines.items()),
                fronts=self._fronts,
                rank=rank,
                num_ranks=ranks,
                num_devices=seat.num_devices,
                devices=seat.devices,
                steps=f"tcp:{steps}" if steps else "",
                coordinator=coordinator,
            )
            crew.children.append(self._launcher.start(seat.host, task, self._environment))

    def _engine_task(self, number: int, devices: tuple[int, ...] | None, host: int) -> EngineTask:
        pages = self._launcher.pages_address(host) if self._config.topology else ""
        return EngineTask(self._config.of_worker(number), number, devices, pages)

    def _lose(self, crew: "_Crew", rank: int, code: int, *, now: float, restart: bool) -> None:
        crew.end()
        if not restart or self.exit_code is not None:
            return
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        # What it ends with where it cannot start; else it is ENGINE_DIED, 0 for want of a connection, or a signal's.
        refused = crew.num_starts == 1 and code > 0 and code != ENGINE_DIED
        if refused or len(self._crews) == 1:
            self.exit_code = code if code > 0 else ENGINE_DIED
            if self.exit_code == ENGINE_DIED:  # else it has said why
                logger.critical("The process of %s %s.", crew.name_of(rank), how)
            return
        crew.pause = _FIRST_PAUSE_S if now - crew.started > _GOOD_LIFE_S else min(2 * crew.pause, _LONGEST_PAUSE_S)
        crew.start_at = now + crew.pause
        logger.error("The process of %s %s; it is started again in %g s.", crew.name_of(rank), how, crew.pause)

    def _try_again(self, crew: "_Crew") -> None:
        try:
            self._start(crew)
        except (OSError, StartError) as error:
            crew.end()
            crew.pause = min(2 * crew.pause, _LONGEST_PAUSE_S)
            crew.start_at = time.monotonic() + crew.pause
            name = crew.name.capitalize()
            logger.error("%s does not start (%s); once more in %g s.", name, error, crew.pause)


def _crews(config: Config, placement: Sequence[Replica]) -> "list[_Crew]":
    if not config.one_process:
        return [_Crew({number: None}, replica, config.engine_name(number)) for number, replica in enumerate(placement)]
    seats = [seat for replica in placement for seat in replica]
    # Nobody else is on the host, so the process may see all of it, as that of a server's only engine does.
    whole = Seat(0, sum(seat.num_devices for seat in seats), None)
    return [_Crew({number: seat.devices for number, seat in enumerate(seats)}, [whole], "the engines")]


class _Crew:
    """The processes of one engine, or the one process of several: all of them, or none."""

    def __init__(self, engines: Mapping[int, tuple[int, ...] | None], seats: Sequence[Seat], name: str):
        self.engines = engines  # the devices of each, of those that the process sees; None: the first ones
        self.seats = seats  # one for each process
        self.name = name
        self.children: list[Child] = []
        self._leaving: list[Child] = []  # told to end, and perhaps still holding devices
        self.num_starts = 0
        self.started = 0.0
        self.start_at = 0.0
        self.pause = _FIRST_PAUSE_S / 2

    def name_of(self, rank: int) -> str:
        """One of its processes."""
        host = f"host {self.seats[rank].host} of " if len(self.seats) > 1 else ""
        return f"{host}{self.name}"

    def ended(self) -> tuple[int, int] | None:
        """The rank and exit code of one that has ended; rather of one that says why than of one that was told."""
        codes = [(rank, code) for rank, child in enumerate(self.children) if (code := child.poll()) is not None]
        return max(codes, key=lambda each: (each[1] != ENGINE_DIED, each[1]), default=None)

    def end(self) -> None:
        for child in self.children:
            child.end()
        self._leaving += self.children
        self.children = []

    def is_gone(self) -> bool:
        """Whether nothing is left of it."""
        self._leaving = [child for child in self._leaving if child.poll() is None]
        return not self.children and not self._leaving
