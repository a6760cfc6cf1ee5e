"""A health check, from a process of its own: whoever makes the load is too busy to time it."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.server.servers import RunningServer

_PROGRAM = """
import http.client, sys, time
while True:
    started = time.perf_counter()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
        connection.request("GET", "/ping")
        status = connection.getresponse().status
        connection.close()
    except OSError as error:
        status = type(error).__name__
    print(status, time.perf_counter() - started, flush=True)
    time.sleep(0.05)
"""


@dataclass
class Pings:
    """What /ping answered all the while, and how soon."""

    statuses: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def all_well(self) -> bool:
        return {*self.statuses} == {"200"}

    def __str__(self) -> str:
        if not self.seconds:
            return "/ping has not answered"
        p99, slowest = (1000 * share(self.seconds, part) for part in (0.99, 1))
        return f"/ping p99 {p99:.0f} ms, the slowest {slowest:.0f} ms of {len(self.seconds)}"


@contextlib.contextmanager
def pinging(server: RunningServer) -> Iterator[Pings]:
    """Fills what it gives when it ends."""
    pings = Pings()
    with tempfile.TemporaryFile("w+") as out:  # a pipe that nobody reads meanwhile is full after two minutes
        program = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(server.port)], stdout=out)
        try:
            yield pings
        finally:
            program.terminate()
            program.wait()
            out.seek(0)
            for line in out:
                if len(parts := line.split()) == 2:  # or it was ended within a line
                    pings.statuses.append(parts[0])
                    pings.seconds.append(float(parts[1]))


def share(values: list[float], part: float) -> float:
    """The value that this part of all is at most, as 0.99 of them."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]
