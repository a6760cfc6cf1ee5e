"""The server as `h200.py` meets it: started, asked over HTTP, stopped."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_HOST = "127.0.0.1"


class Server:
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

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=10)
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

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds from a request to its first token, on a connection of its own; the answer has one token."""
        body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
        content = json.dumps(body)
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=300)
        connection.connect()
        try:
            started = time.perf_counter()
            connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            line = b"" if response.status == 200 else response.read()
            while response.status == 200 and not _has_text(line := response.readline()):
                assert line, "the stream ended without a token"
            assert response.status == 200, f"the server answered {response.status}: {line[:300]!r}"
            seconds = time.perf_counter() - started
            response.read()
            return seconds
        finally:
            connection.close()

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far, by process: the front, the engine, the text process."""
        return {_name(line): _cpu_seconds(pid) for pid, line in _family(self.process.pid).items()}

    def stop(self) -> None:
        """What does not end by itself is killed; its children go with it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def last_words(self, lines: int = 25) -> str:
        return "\n".join(line[:300] for line in self.log.read_text(errors="replace").splitlines()[-lines:])

    def _wait(self, deadline: float) -> None:
        while True:
            code = self.process.poll()
            assert code is None, f"the server ended with {code}: {self.last_words()}"
            assert time.monotonic() < deadline, f"the server is not ready: {self.last_words()}"
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.get("/ping")[0] == 200:
                    return
            time.sleep(0.05)


def server_command(model: Path, cache: Path, port: int, flags: Sequence[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "hex_llm.server.api_server",
        f"--model={model}",
        "--load_format=dummy",
        f"--host={_HOST}",
        f"--port={port}",
        f"--compilation_cache_dir={cache}",
        *flags,
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(model: Path, cache: Path, flags: Sequence[str], log: Path, *, timeout_s: float) -> Iterator[Server]:
    port = free_port()
    server = Server(server_command(model, cache, port, flags), port, log, timeout_s=timeout_s)
    try:
        yield server
    finally:
        server.stop()


def _has_text(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    event = json.loads(line[6:])
    assert "error" not in event, f"the stream said {event}"
    return any(choice.get("text") for choice in event.get("choices", ()))


def _family(pid: int) -> dict[int, str]:
    """A process and its children, with their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            if pid in (parent, int(folder.name)):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def _name(command: str) -> str:
    return "engine" if "engine_process" in command else "text" if "text.process" in command else "front"


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
