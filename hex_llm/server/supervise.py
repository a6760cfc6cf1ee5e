"""Several HTTP processes on one port: starts them, tells them when to stop, and returns when all have ended."""

import logging
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from hex_llm.config import Config
from hex_llm.launch.fleet import POLL_S, Fleet
from hex_llm.process import CLUSTER_KEY, SECRETS, start_child

logger = logging.getLogger(__name__)

# What the HTTP processes are told with. A user's signals may reach all of them at once, and must count once.
DRAIN, END_NOW = signal.SIGUSR1, signal.SIGUSR2
# A signal that comes again so soon is the same: `timeout` and shells send it to a process and then to its group.
SAME_SIGNAL_S = 0.1
DRAINING = "shuts down. Requests under way have {:g} s to finish; a second signal ends them at once."
_FROM_USER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NOTICE_S = 10.0  # that the HTTP processes have to notice that no engine is left, to say so, and to end


def supervise(config: Config, listener: socket.socket, doors: Sequence[socket.socket], key: bytes, fleet: Fleet) -> int:
    """Signals are held when this is called. When an HTTP process ends, the others finish what they have.

    Returns the exit code of the first one that failed; where a signal ended it, 128 and the signal's number.
    """
    with tempfile.TemporaryDirectory(prefix="hex-llm-metrics-") as folder:
        fronts = [
            _start(config, folder, index, (listener.fileno(), door.fileno()), key) for index, door in enumerate(doors)
        ]
        for each in (listener, *doors):
            each.close()
        ended = _wait(fronts, fleet, config.drain_timeout_s)
    # They fail for the same reason, mostly: it is said once, and last.
    reasons = [reason for front in ended if front.stdout and (reason := front.stdout.read().decode().strip())]
    if reasons:
        print(f"hex-llm: {reasons[0]}", file=sys.stderr)
    code = next((front.returncode for front in ended if front.returncode), fleet.exit_code or 0)
    return 128 - code if code < 0 else code


def _start(config: Config, folder: str, index: int, files: tuple[int, int], key: bytes) -> subprocess.Popen[bytes]:
    words = [msgspec.json.encode(config).decode(), *map(str, (*files, index))]
    environment = {"PROMETHEUS_MULTIPROC_DIR": folder, CLUSTER_KEY: key.decode()}
    return start_child(
        "hex_llm.server.front", words, files, secrets=SECRETS, stdout=subprocess.PIPE, environment=environment
    )


def _wait(
    fronts: Sequence[subprocess.Popen[bytes]], fleet: Fleet, drain_timeout_s: float
) -> list[subprocess.Popen[bytes]]:
    """Until all have ended; returns them in the order in which they did."""
    arrived = _take_signals()
    told_at: float | None = None  # by the user
    drained = False  # the HTTP processes were told
    given_up = 0.0  # when the fleet was
    ended: list[subprocess.Popen[bytes]] = []
    while len(ended) < len(fronts):
        time.sleep(POLL_S)
        while arrived:
            number, at = arrived.popleft()
            if number == signal.SIGHUP:
                _send(fronts, signal.SIGHUP)
            elif told_at is None or at - told_at > SAME_SIGNAL_S:
                what = DRAINING.format(drain_timeout_s) if told_at is None else "ends now."
                logger.warning("%s: %s", signal.Signals(number).name, what)
                if told_at is not None or not drained:
                    _send(fronts, DRAIN if told_at is None else END_NOW)
                told_at, drained = told_at or at, True
        for front in fronts:
            if front not in ended and front.poll() is not None:
                ended.append(front)
                if front.returncode < 0:
                    logger.critical("An HTTP process (%d) was ended by signal %d.", front.pid, -front.returncode)
        fleet.poll(restart=not drained and not ended)
        if fleet.exit_code is not None:
            given_up = given_up or time.monotonic()
        # Of an engine's end they know themselves, unless it came before it had connected.
        if not drained and (ended or (given_up and time.monotonic() - given_up > _NOTICE_S)):
            _send(fronts, DRAIN)
            drained = True
    return ended


def _take_signals() -> deque[tuple[int, float]]:
    """The user's signals as they come, and when. They have handlers because they are held in this thread only: any
    other, such as an agent's connection or Ray has, would otherwise have the process end at once.
    """
    arrived: deque[tuple[int, float]] = deque()
    for number in _FROM_USER:
        signal.signal(number, lambda number, _: arrived.append((number, time.monotonic())))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FROM_USER)
    return arrived


def _send(fronts: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for front in fronts:
        front.send_signal(number)  # which does nothing where it has ended
