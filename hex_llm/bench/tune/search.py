"""Which settings to try next: one flag is turned at a time, in the direction that helps, until none helps any more."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hex_llm.bench.tune.axes import Axis, Setting

NOISE = 0.01  # a gain by less than this share is none: a run is hardly ever the same twice


@dataclass(frozen=True, slots=True)
class Targets:
    """Milliseconds that must not be passed; None: any will do."""

    ttft_ms: float | None
    tpot_ms: float | None


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting and what was found: tokens a second, and the times that targets are about; or why there is nothing."""

    setting: Setting
    tokens_per_s: float = 0.0
    ttft_ms: float = math.inf
    tpot_ms: float = math.inf
    failed: str | None = None

    def excess(self, targets: Targets) -> float:
        """How far it is from the targets: the largest of time over target, and 1 where all are met."""
        pairs = ((self.ttft_ms, targets.ttft_ms), (self.tpot_ms, targets.tpot_ms))
        return max([1.0, *(time / target for time, target in pairs if target is not None)])


def is_better(one: Trial, other: Trial, targets: Targets) -> bool:
    """Closer to the targets; where both meet them, faster."""
    if one.failed is not None or other.failed is not None:
        return one.failed is None
    a, b = one.excess(targets), other.excess(targets)
    if a == b == 1:
        return one.tokens_per_s > (1 + NOISE) * other.tokens_per_s
    return a < b / (1 + NOISE) or (a == 1 and b > 1)


def search(
    start: Setting,
    axes: Sequence[Axis],
    targets: Targets,
    measure: Callable[[Setting], Trial],
    may_go_on: Callable[[], bool],
) -> Iterator[tuple[Trial, bool]]:
    """Every trial as it comes, and whether it is the best so far. The first is always made."""
    tried = {start: measure(start)}
    best = tried[start]
    yield best, True
    improved = True
    while improved:
        improved = False
        for axis in axes:
            for direction in (1, -1):
                while (setting := _next(best.setting, axis, direction)) is not None and setting not in tried:
                    if not may_go_on():
                        return
                    trial = tried[setting] = measure(setting)
                    helped = is_better(trial, best, targets)
                    yield trial, helped
                    if not helped:
                        break
                    best, improved = trial, True


def _next(setting: Setting, axis: Axis, direction: int) -> Setting | None:
    """One step further along an axis; what the server chooses counts as its middle."""
    value = setting.of(axis.flag)
    place = (len(axis.values) // 2 if value is None else axis.values.index(value)) + direction
    return setting.with_(axis.flag, axis.values[place]) if 0 <= place < len(axis.values) else None
