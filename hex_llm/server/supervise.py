"""Several HTTP processes on one port: starts them, tells them when to stop, and returns when all have ended."""

import logging
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import msgspec

from hex_llm.config import Config
from hex_llm.launch.fleet import POLL_S, Fleet
from hex_llm.process import CLUSTER_KEY, start_child

logger = logging.getLogger(__name__)

# What the HTTP processes are told with. A user's signals may reach all of them at once, and must count once.
DRAIN, END_NOW = signal.SIGUSR1, signal.SIGUSR2
# A signal that comes again so soon is the same: `timeout` and shells send it to a process and then to its group.
SAME_SIGNAL_S = 0.1
DRAINING = "shuts down. Requests under way have {:g} s to finish; a second signal ends them at once."
_NOTICE_S = 10.0  # that the HTTP processes have to notice that no engine is left, to say so, and to end


def supervise(config: Config, listener: socket.socket, doors: Sequence[socket.socket], key: bytes, fleet: Fleet) -> int:
    """Signals are held when this is called, and stay so. When an HTTP process ends, the others finish what they have.

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
        "hex_llm.server.front", words, files, secrets=True, stdout=subprocess.PIPE, environment=environment
    )


def _wait(
    fronts: Sequence[subprocess.Popen[bytes]], fleet: Fleet, drain_timeout_s: float
) -> list[subprocess.Popen[bytes]]:
    """Until all have ended; returns them in the order in which they did."""
    told_at: float | None = None  # by the user
    drained = False  # the HTTP processes were told
    given_up = 0.0  # when the fleet was
    ended: list[subprocess.Popen[bytes]] = []
    while len(ended) < len(fronts):
        came = signal.sigtimedwait((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), POLL_S)
        if came and came.si_signo == signal.SIGHUP:
            _send(fronts, signal.SIGHUP)
        elif came and (told_at is None or time.monotonic() - told_at > SAME_SIGNAL_S):
            what = DRAINING.format(drain_timeout_s) if told_at is None else "ends now."
            logger.warning("%s: %s", signal.Signals(came.si_signo).name, what)
            if told_at is not None or not drained:
                _send(fronts, DRAIN if told_at is None else END_NOW)
            told_at, drained = told_at or time.monotonic(), True
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


def _send(fronts: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for front in fronts:
        front.send_signal(number)  # which does nothing where it has ended
