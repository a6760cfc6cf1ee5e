"""Machines that grant little (F35): few open files, no room on the disk, a cache that is damaged, a clock that jumps.
The server goes on serving, and does nothing where it has nothing to do."""

import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.faults.oracles import check_oracles
from tests.faults.suite import record, sized
from tests.server.servers import RunningServer, children_of, running_server

BODY = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
FLAGS = ("--max_decode_seqs=1", "--max_num_batched_tokens=64")  # few programs: some servers here compile all
IDLE = 0.05  # of a core
BUSY = 1.5  # cores, at most, of a server that is short of something and has nothing to do


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Of all that the servers here compile, once the first has been there."""
    return tmp_path_factory.mktemp("cache") / "xla"


@pytest.fixture(scope="module")
def plain(folder, cache, tmp_path_factory) -> tuple[str, float]:
    """What the model says on a machine that lacks nothing, and what its server takes of a core when it is idle."""
    with running_server(folder, tmp_path_factory.mktemp("plain") / "log", *FLAGS, keep(cache)) as server:
        return text(server), load(server, 10)


@pytest.fixture
def answer(plain) -> str:
    return plain[0]


def keep(cache: Path) -> str:
    return f"--compilation_cache_dir={cache}"


def text(server: RunningServer) -> str:
    answered = server.post("/v1/completions", BODY)
    assert answered.status_code == 200, answered.text
    return answered.json()["choices"][0]["text"]


def load(server: RunningServer, seconds: float) -> float:
    """Of a core, that all processes of a server take together."""
    pids = [server.process.pid, *children_of(server.process.pid)]
    before, started = sum(map(ticks, pids)), time.monotonic()
    time.sleep(seconds)
    used = (sum(map(ticks, pids)) - before) / os.sysconf("SC_CLK_TCK")
    return used / (time.monotonic() - started)


def ticks(pid: int) -> int:
    """That a process has had of the processors."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])


@contextmanager
def limited(folder: Path, log: Path, kind: int, limit: int, *flags: str) -> Iterator[RunningServer]:
    """A server whose processes have a limit of the kernel's from their first moments on."""
    with running_server(folder, log, *flags, ready=False) as server:
        resource.prlimit(server.process.pid, kind, (limit, limit))
        server.wait_until_ready()
        yield server


def test_an_idle_server_takes_next_to_nothing(plain):
    _, idle = plain
    assert 0 < idle <= IDLE
    record("F35", f"an idle server takes {100 * idle:.1f} % of a core")


def test_with_64_open_files_it_serves_those_that_it_has_room_for(folder, answer, cache, tmp_path):
    with limited(folder, tmp_path / "log", resource.RLIMIT_NOFILE, 64, *FLAGS, keep(cache)) as server:
        with httpx.Client(base_url=server.url, timeout=60) as early, ExitStack() as stack:
            assert early.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == answer
            for _ in range(100):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            crowded = load(server, sized(2, 10))
            assert early.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == answer
        assert crowded <= BUSY
        assert server.process.poll() is None
        assert text(server) == answer
        calm = load(server, sized(3, 10))
        assert calm <= IDLE
        log = (tmp_path / "log").read_text()
        assert "This process may open 64 files" in log
        assert len(log) < 100_000
        check_oracles(server)
    record("F35", f"64 open files, 100 connections: {100 * crowded:.1f} % of a core; without them served as before")


def test_a_disk_without_room_for_the_log_and_the_cache_is_done_without(folder, answer, cache, tmp_path):
    """The kernel refuses to make any file longer than 1000 bytes."""
    own = shutil.copytree(cache, tmp_path / "xla")
    missing = some_entries(own)
    for path in missing:
        path.unlink()
    with limited(folder, tmp_path / "log", resource.RLIMIT_FSIZE, 1000, *FLAGS, keep(own)) as server:
        for _ in range(20):  # each a line in the log
            assert text(server) == answer
        assert load(server, sized(5, 10)) <= IDLE
        assert server.get("/ping").status_code == 200
        check_oracles(server)
    assert (tmp_path / "log").stat().st_size <= 1000
    assert all(not path.exists() or path.stat().st_size <= 1000 for path in missing)
    # What is left of them is of no use, and in nobody's way.
    with running_server(folder, tmp_path / "log", *FLAGS, keep(own)) as server:
        assert text(server) == answer
    assert all(path.stat().st_size > 1000 for path in missing)
    record(
        "F35", "no room for the log and the cache: 20 of 20 requests are served; with room again, the cache is whole"
    )


def test_a_damaged_cache_is_passed_over_and_made_anew(folder, answer, cache, tmp_path):
    own = shutil.copytree(cache, tmp_path / "xla")
    damaged = some_entries(own)
    for path in damaged:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    with running_server(folder, tmp_path / "log", *FLAGS, keep(own)) as server:
        assert text(server) == answer
        check_oracles(server)
    told = (tmp_path / "log").read_text()
    assert "is damaged; it is compiled again" in told
    assert "is damaged; what it keeps is made again" in told
    with running_server(folder, tmp_path / "log", *FLAGS, keep(own)) as server:
        assert text(server) == answer
    assert "damaged" not in (tmp_path / "log").read_text()
    record("F35", f"{len(damaged)} damaged entries of JAX's cache and ours: passed over, told of, and made anew")


def some_entries(cache: Path) -> list[Path]:
    """Of JAX's compiled programs, and of those that only are lowered."""
    compiled, lowered = sorted(cache.glob("jit_forward*-cache")), sorted(cache.glob("lowered/forward*"))
    assert compiled
    assert lowered
    return sized([compiled[0], lowered[0]], [*cache.glob("*-cache"), *cache.glob("lowered/[a-z]*")])


def test_a_cache_that_cannot_be_written_to_is_done_without(folder, answer, tmp_path):
    """In /proc nobody can make a folder, not even root."""
    flags = (*FLAGS, keep(Path("/proc/hex-llm")), "--no-warmup")
    with running_server(folder, tmp_path / "log", *flags) as server:
        assert text(server) == answer
    log = (tmp_path / "log").read_text()
    assert log.count("cannot be written to") in (1, 2)  # JAX's, and that of lowered programs
    assert "Traceback" not in log
    record("F35", "a cache on a disk that can only be read: told of, and served")


def test_a_clock_that_jumps_an_hour_changes_nothing(folder, answer, cache, tmp_path):
    """Neither for those that wait, nor for an idle server, in whichever direction."""
    offset, path = tmp_path / "offset", str(Path(__file__).parent / "clock")
    offset.write_text("0")
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH", "")))),
        "HEX_LLM_CLOCK": str(offset),
    }
    flags = (*FLAGS, keep(cache), "--queue_timeout_s=60", "--step_timeout_s=60")
    with running_server(folder, tmp_path / "log", *flags, **environment) as server:
        for hours in (1, -1, 0):
            now = time.time()
            offset.write_text(str(3600 * hours))
            created = server.post("/v1/completions", BODY).json()["created"]
            assert abs(created - now - 3600 * hours) < 60, "the clock did not jump"
            assert text(server) == answer
            assert server.get("/ping").status_code == 200
        metrics = server.metrics()
        assert metrics["hexllm:engine_last_step_age_seconds"] < 60
        assert load(server, 5) <= IDLE
        check_oracles(server)
    record("F35", "the clock an hour ahead, then back, then right: all is served, and nothing ends")
