"""Faults on purpose, to see what becomes of everything else: HEX_LLM_FAULTS=POINT:ACTION[@WHEN],...

WHEN says which of the times that a process comes to the point: `5` the fifth, `5-8` those, `5-` all from the fifth on,
`0.1` one in ten, by lot; without it, every time. `engine.step:kill@100` kills the engine at its hundredth step.

Where the variable is not set, coming to a point costs a look at that.
"""

import functools
import itertools
import math
import os
import random
import signal
import threading
import time
from collections.abc import Mapping

from hex_llm.errors import ConfigError

VARIABLE = "HEX_LLM_FAULTS"
ARE_SET = bool(os.environ.get(VARIABLE))

# What may happen at each point. The first three are done here; the others are told to whoever has come to the point.
RAISE, KILL, SLEEP = "raise", "kill", "sleep"  # of sleep, the seconds follow: sleep30
OUT_OF_MEMORY, NAN, DROP, NOW, RESET, FLIP = "oom", "nan", "drop", "now", "reset", "flip"
POINTS: Mapping[str, tuple[str, ...]] = {
    "engine.step": (RAISE, KILL, SLEEP),  # before a step is handed to the device
    "engine.preempt": (NOW,),  # as often; takes the youngest request's memory away
    "engine.row": (NAN,),  # for each sequence that a step gives a token to
    "device.weights": (OUT_OF_MEMORY, SLEEP),  # before the weights are loaded
    "device.kv": (OUT_OF_MEMORY,),  # before the KV cache is allocated
    "device.program": (OUT_OF_MEMORY,),  # for each program that is compiled
    "device.step": (OUT_OF_MEMORY,),  # in a step, when the KV cache has been given to it
    "device.blocks": (NAN,),  # for each step; what is in blocks that nobody has becomes NaN
    "frames.read": (DROP,),  # for each message of a numbered connection: of engines, hosts and blocks on their way
    "source.open": (SLEEP, RESET, "429", "503"),  # for each question to a server that has files
    "source.write": (FLIP,),  # for each piece of a file that has come, one of whose bits changes
    "text.job": (RAISE, KILL, SLEEP),  # for each prompt that the text process encodes
}


class InjectedFault(Exception):
    """What HEX_LLM_FAULTS asked for."""


class _Fault:
    def __init__(self, action: str, seconds: float, first: int, last: float, share: float):
        self.action = action
        self._seconds = seconds
        self._first, self._last, self._share = first, last, share
        self._times = itertools.count(1)
        self._lots = random.Random(0)
        self._lock = threading.Lock()

    def reach(self, point: str) -> str | None:
        with self._lock:
            number = next(self._times)
            if not (self._first <= number <= self._last and self._lots.random() < self._share):
                return None
        match self.action:
            case "raise":
                raise InjectedFault(f"{VARIABLE} wants {point} to fail here, at time {number}.")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(self._seconds)
        return self.action


def reach(point: str) -> str | None:
    """Has happen what is wanted at a point, or returns what whoever has come there is to do."""
    if not ARE_SET or (fault := _faults().get(point)) is None:
        return None
    return fault.reach(point)


def parse(text: str) -> dict[str, _Fault]:
    """By point; ConfigError where it is not as it should be."""
    faults = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        point, _, rest = each.partition(":")
        action, _, when = rest.partition("@")
        if point not in POINTS:
            raise ConfigError(f"{VARIABLE}={each}: there is no point {point!r}; there are {', '.join(POINTS)}.")
        if point in faults:
            raise ConfigError(f"{VARIABLE}={text}: {point} is there twice.")
        kind = SLEEP if action.startswith(SLEEP) else action
        if kind not in POINTS[point]:
            raise ConfigError(f"{VARIABLE}={each}: at {point} there may be {', '.join(POINTS[point])}, not {action!r}.")
        try:
            seconds = _parse_seconds(action.removeprefix(SLEEP)) if kind == SLEEP else 0.0
            faults[point] = _Fault(kind, seconds, *_parse_when(when))
        except ValueError:
            raise ConfigError(
                f"{VARIABLE}={each}: it is POINT:ACTION@WHEN, where sleep has its seconds, 0 or more, behind it"
                " (sleep30), and WHEN is a number from 1 on, two with - between, one with - behind, or a share such as"
                " 0.1."
            ) from None
    return faults


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:  # nor NaN
        raise ValueError
    return seconds


def _parse_when(text: str) -> tuple[int, float, float]:
    """The first time, the last one, and the share of those between."""
    if not text:
        return 1, math.inf, 1.0
    if "." in text:
        share = float(text)
        if not 0 < share <= 1:
            raise ValueError
        return 1, math.inf, share
    first, dash, last = text.partition("-")
    numbers = int(first), (int(last) if last else math.inf if dash else int(first))
    if not 1 <= numbers[0] <= numbers[1]:
        raise ValueError
    return *numbers, 1.0


@functools.cache
def _faults() -> dict[str, _Fault]:
    return parse(os.environ.get(VARIABLE, ""))
