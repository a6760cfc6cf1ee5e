"""A server on this machine that is started to be measured: a process of its own, asked over HTTP, and stopped."""

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from hex_llm.errors import StartError

HOST = "127.0.0.1"
POLL_S = 0.05
STOP_S = 15  # for a server to end by itself, after which it is killed


class LocalServer:
    """A server's process, ready to answer. `ready_s` is how long that took."""

    def __init__(self, command: Sequence[str], port: int, log: Path, *, timeout_s: float):
        self.port = port
        self.log = log
        started = time.monotonic()
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            self._wait(started + timeout_s)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - started

    @classmethod
    @contextlib.contextmanager
    def running(cls, flags: Sequence[str], log: Path, *, timeout_s: float) -> Iterator[Self]:
        """One with these flags, at a port that nobody has."""
        port = free_port()
        server = cls(server_command(port, flags), port, log, timeout_s=timeout_s)
        try:
            yield server
        finally:
            server.stop()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Every sample by its name, labels and all."""
        samples = [line.rpartition(" ") for line in self.get("/metrics")[1].splitlines() if line[:1] not in ("", "#")]
        return {name: float(value) for name, _, value in samples}

    def stop(self) -> None:
        """What does not end by itself is killed; its children go with it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def last_words(self, lines: int = 25) -> str:
        return "\n".join(line[:300] for line in self.log.read_text(errors="replace").splitlines()[-lines:])

    def _wait(self, deadline: float) -> None:
        while True:
            code = self.process.poll()
            if code is not None:
                raise StartError(f"The server ended with {code}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise StartError(f"The server is not ready in time: {self.last_words()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.get("/ping")[0] == 200:
                    return
            time.sleep(POLL_S)


def server_command(port: int, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "hex_llm.server.api_server", f"--host={HOST}", f"--port={port}", *flags]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
