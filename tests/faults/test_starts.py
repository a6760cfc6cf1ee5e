"""Ports that cannot be had (F26), what a server says while it starts (F27), and its end before it is ready (F8)."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from hex_llm import faults
from tests.checkpoints import write_llama
from tests.download.servers import running_stand_in
from tests.faults.crowd import crowding
from tests.faults.starts import End, server_end, slowest
from tests.faults.suite import record, sized
from tests.server.servers import RunningServer, children_of, is_gone, running_server

# Is imported in the place of JAX: whoever touches the model comes past it.
NO_JAX = "raise SystemExit('JAX was imported')"
CAPBSET_DROP, NET_BIND_SERVICE = 24, 10  # as Linux numbers them


def without_jax(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "jax.py").write_text(NO_JAX)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))}


def test_a_port_that_cannot_be_had_ends_the_start_before_the_model_is_touched(tmp_path):
    """The model is one that would end it with another code."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            f"--port={port} cannot be listened on": ["--host=127.0.0.1", f"--port={port}"],
            "the host cannot be looked up": ["--host=not-a-host.invalid", "--port=0"],
            "--host=192.0.2.7 --port=0 cannot be listened on": ["--host=192.0.2.7", "--port=0"],
        }
        ends = {words: server_end("--model=/etc", *flags, **without_jax(tmp_path)) for words, flags in cases.items()}
    check_refused(ends)
    assert f"Process {os.getpid()} (" in next(iter(ends.values())).said
    record("F26", f"{len(ends)} of {len(cases)} addresses that cannot be had: exit 5, {slowest(ends)}")


def check_refused(ends: dict[str, End]) -> None:
    for words, end in ends.items():
        assert end.code == 5, end.said
        assert words in end.said
        assert end.within(3), f"{end.seconds:.1f} s"


@pytest.mark.skipif(
    int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 80, reason="anybody may have port 80 here"
)
def test_a_port_that_only_root_may_have_ends_the_start():
    """Also where the tests are root's: then the right is given up first."""
    serve = [sys.executable, "-m", "hex_llm.server.api_server", "--model=/etc", "--host=127.0.0.1", "--port=80"]
    drop = f"ctypes.CDLL(None).prctl({CAPBSET_DROP}, {NET_BIND_SERVICE})"
    program = f"import ctypes, os; {drop}; os.execv({serve[0]!r}, {serve})"
    started, before = time.monotonic(), crowding()
    done = subprocess.run([serve[0], "-c", program], capture_output=True, text=True, timeout=60, check=False)
    end = End(done.returncode, done.stderr.strip(), time.monotonic() - started, max(before, crowding()))
    check_refused({"--port=80 cannot be listened on: Permission denied": end})
    record("F26", f"port 80 without root's rights: exit 5 after {end.seconds:.1f} s")


class Watch:
    """What /ping says from the start of a server on, time after time."""

    def __init__(self, server: RunningServer):
        self.started = time.monotonic()
        self._server = server
        self.statuses: list[int] = []
        self.phases: list[str] = []
        self.accepted = self.ready = 0.0

    def until(self, phase: str, seconds: float = 120) -> None:
        """That is told, or that a start has ended which was to tell it."""
        while phase not in self.phases and not self.ready:
            assert time.monotonic() - self.started < seconds, self._server.log.read_text()
            assert self._server.process.poll() is None, self._server.log.read_text()
            self._look()
            time.sleep(0.02)

    def _look(self) -> None:
        try:
            with socket.create_connection(("127.0.0.1", self._server.port), 1):
                self.accepted = self.accepted or time.monotonic() - self.started
            answer = self._server.get("/ping")
        except (OSError, httpx.TransportError):
            return
        self.statuses.append(answer.status_code)
        if answer.status_code == 200:
            self.ready = time.monotonic() - self.started
        else:
            self.phases.append(answer.json()["phase"])


def test_ping_is_503_from_the_first_seconds_until_a_token_can_be_had(folder, tmp_path):
    accepted, looks, before = [], 0, crowding()
    for _ in range(sized(1, 10)):
        with running_server(folder, tmp_path / "log", ready=False) as server:
            watch = Watch(server)
            watch.until("never")
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
            assert "hexllm:xla_compiles_after_ready_total 0.0" in server.get("/metrics").text
        assert watch.statuses == [503] * (len(watch.statuses) - 1) + [200]
        assert len(watch.statuses) > 5
        accepted.append(watch.accepted)
        looks += len(watch.statuses) - 1
    assert max(accepted) < 2 * max(before, crowding()), accepted
    answers = f"/ping is 503 {looks} times of {looks}, then 200, and the next request has its token"
    record("F27", f"TCP is accepted {max(accepted):.1f} s after exec; {answers}")


def end_at(server: RunningServer, phase: str) -> float:
    """Seconds that a server takes to end which is told so in a phase of its start; nothing is left of it."""
    watch = Watch(server)
    watch.until(phase)
    assert watch.phases[-1] == phase, f"{phase} was over before it was seen"
    children, told, before = children_of(server.process.pid), time.monotonic(), crowding()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    seconds = time.monotonic() - told
    assert seconds < 5 * max(before, crowding()), f"{phase}: {seconds:.1f} s"
    time.sleep(0.5)
    assert all(map(is_gone, children))
    assert "Traceback" not in server.log.read_text()
    return seconds


@pytest.mark.parametrize("phase", ["starting", "planning memory", "loading weights", "compiling"])
def test_sigterm_ends_a_start(phase, folder, tmp_path):
    # The weights of so small a model are there before anybody could see that they are loaded.
    held = {faults.VARIABLE: "device.weights:sleep60"} if phase == "loading weights" else {}
    seconds = []
    for number in range(sized(1, 10)):
        cache = tmp_path / f"cache-{number}"
        flags = (f"--compilation_cache_dir={cache}",)
        with running_server(folder, tmp_path / "log", *flags, ready=False, **held) as server:
            seconds.append(end_at(server, phase))
        # JAX's own entries may be half: tests/runner/test_cache_folder.py has what becomes of those.
        for path in (each for each in cache.glob("lowered/[a-z]*") if each.suffix != ".lock"):
            content = path.read_bytes()
            assert hashlib.sha256(content[32:]).digest() == content[:32]
    record("F8", f"SIGTERM while {phase}: exit 0, the slowest of {len(seconds)} after {max(seconds):.1f} s")


def test_sigterm_ends_a_download_and_leaves_no_file_under_its_name(tmp_path):
    with running_stand_in(tmp_path / "stand_in") as stand_in:
        write_llama(stand_in.hub("test/slow"))
        stand_in.set_faults({"match": "cdn/test/slow/model", "stall": 60, "cut": 0.5, "times": 100})
        with running_server(None, tmp_path / "log", "--model=test/slow", ready=False, **stand_in.environment) as server:
            seconds = end_at(server, "downloading the model")
        (folder,) = (stand_in.root / "home" / "hub" / "models--test--slow" / "snapshots").iterdir()
        assert not list(folder.glob("*.safetensors"))
    record("F8", f"SIGTERM while downloading: exit 0 after {seconds:.1f} s, no file under its name")
