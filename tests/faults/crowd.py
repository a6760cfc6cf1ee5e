"""How much others are using the machine, so that limits on seconds hold for what is tested, and not for those."""

import time

from tests.faults.suite import sized

_SPIN_S = 0.05  # of the processor's time


def crowding() -> float:
    """How often longer than on an idle machine work takes just now: 1 where nobody else has any, and at full size,
    where nobody else is to have any.
    """
    started, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < _SPIN_S:
        pass
    return sized(max(1.0, (time.monotonic() - started) / _SPIN_S), 1.0)
