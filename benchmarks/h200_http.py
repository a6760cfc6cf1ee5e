"""The server as `h200.py` meets it: started, asked over HTTP, stopped."""

import contextlib
import http.client
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from hex_llm.bench import local_server
from hex_llm.bench.local_server import HOST, LocalServer


class Server(LocalServer):
    """What else a benchmark asks one."""

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds from a request to its first token, on a connection of its own; the answer has one token."""
        body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
        content = json.dumps(body)
        connection = http.client.HTTPConnection(HOST, self.port, timeout=300)
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


def server_command(model: Path, cache: Path, port: int, flags: Sequence[str]) -> list[str]:
    return local_server.server_command(port, _flags(model, cache, flags))


def running(
    model: Path, cache: Path, flags: Sequence[str], log: Path, *, timeout_s: float
) -> contextlib.AbstractContextManager[Server]:
    return Server.running(_flags(model, cache, flags), log, timeout_s=timeout_s)


def _flags(model: Path, cache: Path, more: Sequence[str]) -> list[str]:
    return [f"--model={model}", "--load_format=dummy", f"--compilation_cache_dir={cache}", *more]


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
