"""Trying again: what may work later, how long is waited for it, and when it is given up."""

import logging
import random
import threading
import time
from collections.abc import Callable

from hex_llm.errors import DownloadError

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 64.0


class Again(Exception):
    """Something that did not work and may work later; the other side asks to wait `after` seconds, or more."""

    def __init__(self, reason: str, after: float = 0.0):
        super().__init__(reason)
        self.after = after


class Stopped(Exception):
    """Nobody wants it any more."""


class Patience:
    """Ends once nothing has come for `seconds`. The threads of a download share one."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._since = time.monotonic()
        self._stop = threading.Event()

    def renew(self) -> None:
        """Something has come."""
        self.check()
        self._since = time.monotonic()

    def stop(self) -> None:
        """Has all threads end soon: whatever they call here raises Stopped."""
        self._stop.set()

    def check(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def wait(self, again: Again, attempt: int) -> None:
        """Before a try that follows `attempt` others, counted from 0. DownloadError where there is none any more."""
        pause = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S) * random.uniform(0.75, 1)
        pause = max(pause, again.after)
        if time.monotonic() + pause > self._since + self._seconds:
            raise DownloadError(f"{again} It is given up after {self._seconds:g} s without a byte.")
        logger.warning("%s Once more in %.1f s.", again, pause)
        if self._stop.wait(pause):
            raise Stopped


def persist[T](attempt: Callable[[int], T], patience: Patience) -> T:
    """What `attempt` returns, which is told how often it was called before."""
    number = 0
    while True:
        try:
            return attempt(number)
        except Again as again:
            patience.wait(again, number)
            number += 1
