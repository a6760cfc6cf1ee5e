"""Those who want the same thing at the same time wait for one who gets it."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from hex_llm.download.patience import Patience, Stopped


@dataclass(frozen=True, slots=True)
class _Flight:
    outcome: Future[Any]
    patience: Patience
    deadline: float


class Flights:
    """Nobody waits longer than `timeout_s`, also where a connection hangs: what is got is got in a thread of its own,
    which is told to end and left alone.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._flights: dict[str, _Flight] = {}

    def join[T](self, key: str, work: Callable[[Patience], T]) -> T:
        """What `work` returns, or raises, here or for somebody who came before; TimeoutError if that takes too long."""
        with self._lock:
            flight = self._flights.get(key)
            if flight is None:
                flight = _Flight(Future(), Patience(self._timeout_s), time.monotonic() + self._timeout_s)
                self._flights[key] = flight
                threading.Thread(target=self._fly, args=(key, flight, work), daemon=True, name="adapter").start()
        wait([flight.outcome], flight.deadline - time.monotonic())
        if not flight.outcome.done():
            flight.patience.stop()
            self._forget(key, flight)
            raise TimeoutError(f"{self._timeout_s:g} s")
        try:
            return flight.outcome.result()
        except Stopped:  # by another who waited as long
            raise TimeoutError(f"{self._timeout_s:g} s") from None

    def _fly(self, key: str, flight: _Flight, work: Callable[[Patience], Any]) -> None:
        try:
            result = work(flight.patience)
        except BaseException as error:
            flight.outcome.set_exception(error)
        else:
            flight.outcome.set_result(result)
        self._forget(key, flight)

    def _forget(self, key: str, flight: _Flight) -> None:
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]
