"""Real servers in processes of their own, for tests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

# Few and small shapes, as in tests/runner/engines.py; compiled when a server starts, as in earnest.
FLAGS = (
    "--max_model_len=256",
    "--num_blocks=512",
    "--block_size=8",
    "--max_decode_seqs=16",
    "--prefill_len_padding=64",
    "--max_num_batched_tokens=256",
    "--decode_blocks_padding=1",
)

_CHECKED = Path(__file__).parent / "checked"


def checked() -> dict[str, str]:
    """The environment of a server whose engines look whenever they are idle whether they have lost anything."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(_CHECKED), os.environ.get("PYTHONPATH", ""))))}


class RunningServer:
    """A server's process. Its log is in `log`."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path, key: str | None):
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.key = key

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def get(self, path: str, timeout: float = 10) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=timeout)

    def post(self, path: str, body: object, timeout: float = 60) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=self.headers, timeout=timeout)

    def wait_until_ready(self, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while True:
            code = self.process.poll()
            assert code is None, f"the server ended with {code}:\n{self.log.read_text()}"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + "/ping", timeout=5, verify=False).status_code == 200:
                    return
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def metrics(self) -> dict[str, float]:
        """Every sample by its name, labels and all."""
        samples = {}
        for line in self.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def children(self) -> dict[int, str]:
        """Its child processes and what they run."""
        return children_of(self.process.pid)

    @property
    def engine_pid(self) -> int:
        (pid,) = [pid for pid, line in self.children().items() if "hex_llm.engine_process" in line]
        return pid


def is_gone(pid: int) -> bool:
    """Whether a process has ended, also one that nobody has asked after yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


def children_of(pid: int) -> dict[int, str]:
    children = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            status = (folder / "stat").read_text().rpartition(") ")[2].split()
            if int(status[1]) == pid and status[0] != "Z":
                children[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return children


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running_server(
    folder: Path | None,
    log: Path,
    *flags: str,
    small: bool = True,
    ready: bool = True,
    keys: Sequence[str] = (),
    command: Sequence[str] = (sys.executable, "-m", "hex_llm.server.api_server"),
    start_in: Path | None = None,
    port: int | None = None,
    **environment: str,
) -> Iterator[RunningServer]:
    """A server for the model in `folder`, or the embedded one, in a process group of its own; ended after the body."""
    port = port or free_port()
    argv = [*command, "--host=127.0.0.1", f"--port={port}"]
    argv += [f"--model={folder}"] if folder else []
    argv += [*(FLAGS if small else ()), *flags]
    environment |= {"HEXLLM_API_KEYS": ",".join(keys)} if keys else {}
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            cwd=start_in,
            stdout=out,
            stderr=out,
            env=os.environ | environment,
            start_new_session=True,
        )
    server = RunningServer(process, port, log, keys[0] if keys else None)
    try:
        if ready:
            server.wait_until_ready()
        yield server
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """Without waiting for requests under way."""
    for seconds in (0.5, 10):
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
    process.kill()
    process.wait()
