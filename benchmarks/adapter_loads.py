"""What it does to answers under way that adapters are loaded which nobody has seen before, on a CPU.

    python -m benchmarks.adapter_loads

Some streams of the embedded model decode all the while. Beside them come windows of short requests, one after another:
for the model alone, with an adapter that has its place already, and each with one that is new; and quiet windows. What
counts is the time between two tokens of the streams, within windows of each kind, all of one run: what a load costs is
what the new ones take longer than the known one. They lie in folders, and then on a stand-in of the hub, from which
they are downloaded.
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from benchmarks.h200_http import Server
from hex_llm.bench.local_server import free_port
from tests.download.servers import RunningStandIn, running_stand_in

_PATTERN = Path(__file__).parents[1] / "examples/adapters/shouting"
_KINDS = ("quiet", "base", "known", "new")


class Streams:
    """Clients that have answers streamed to them, one after the other, until they are told to stop. `gaps` are the
    seconds between two tokens of an answer, with the moments at which they ended.
    """

    def __init__(self, port: int, count: int, tokens: int):
        self.gaps: list[tuple[float, float]] = []
        self._port, self._tokens = port, tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(number,)) for number in range(count)]
        for each in self._threads:
            each.start()

    def end(self) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _read(self, number: int) -> None:
        while not self._stop.is_set():
            body = {"prompt": [5 + number, 6, 7], "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
            with _posted(self._port, body) as response:
                last = None
                while not self._stop.is_set() and (line := response.readline()):
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self.gaps.append((now, now - last))
                        last = now


def main() -> None:
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        sources = [f"a{number}" for number in range(arguments.rounds * arguments.adapters + 1)]
        for number, source in enumerate(sources):
            _write_adapter(home / "folders" / source, number)
        print(f"{'':8} {'':8} {'gaps':>7} {'p50':>7} {'p90':>7} {'p99':>7} {'most':>7}  ms   {'of a request':>12}")
        named = ",".join(f"{source}={home / 'folders' / source}" for source in sources)
        _measure("folder", sources, [f"--lora_modules={named}"], {}, arguments)
        with running_stand_in(home / "stand_in") as stand_in:
            hub = [_put(stand_in, home / "folders" / source) for source in sources]
            _measure("hub", hub, ["--lora_allowed_prefixes=test/"], stand_in.environment, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="windows of each kind")
    parser.add_argument("--adapters", type=int, default=12, help="requests of a window; fewer than there are places")
    parser.add_argument("--pause_s", type=float, default=0.1, help="between two requests of a window")
    parser.add_argument("--answer_tokens", type=int, default=400)
    parser.add_argument("flags", nargs="*", help="flags of the servers, after --")
    return parser


def _write_adapter(folder: Path, seed: int) -> None:
    """One of the examples, with numbers of its own."""
    shutil.copytree(_PATTERN, folder)
    path = folder / "adapter_model.safetensors"
    with safe_open(path, "numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    random = np.random.default_rng(seed)
    save_file({name: random.normal(0, 0.01, shape).astype(np.float32) for name, shape in shapes.items()}, path)


def _put(stand_in: RunningStandIn, folder: Path) -> str:
    shutil.copytree(folder, stand_in.hub(f"test/{folder.name}"), dirs_exist_ok=True)
    return f"test/{folder.name}"


def _measure(
    where: str, sources: list[str], flags: list[str], environment: dict[str, str], given: argparse.Namespace
) -> None:
    port = free_port()
    command = [
        sys.executable, "-m", "hex_llm.server.api_server", "--host=127.0.0.1", f"--port={port}", "--enable_lora",
        "--disable_log_requests", *flags, *given.flags,
    ]  # fmt: skip
    words = [f"{name}={value}" for name, value in environment.items()]
    with tempfile.TemporaryDirectory() as logs:
        server = Server(["env", *words, *command], port, Path(logs) / "log", timeout_s=300)
        try:
            measured = _windows(port, sources, given)
            loads = sum(value for name, value in server.metrics().items() if "lora_slot_loads" in name)
        finally:
            server.stop()
    assert loads == len(sources), f"{loads} loads of {len(sources)} adapters"
    for kind, (gaps, waited) in measured.items():
        row = "".join(f" {each:7.1f}" for each in np.percentile(gaps, [50, 90, 99, 100]))
        asked = f"{np.median(waited):8.0f} ms" if len(waited) else ""
        print(f"{where:8} {kind:8} {len(gaps):7}{row}       {asked:>12}", flush=True)
    p99 = {kind: np.percentile(gaps, 99) for kind, (gaps, _) in measured.items()}
    print(f"{where:8} p99 with new adapters over that with the known one: {p99['new'] / p99['known']:.2f}", flush=True)


def _windows(port: int, sources: list[str], given: argparse.Namespace) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of windows of each kind, in milliseconds: the streams' gaps, and what the requests took."""
    known, *new = sources
    _ask(port, known)
    streams = Streams(port, given.streams, given.answer_tokens)
    time.sleep(2)  # they decode by now
    windows: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
    waited: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for first in range(0, len(new), given.adapters):
        count = given.adapters
        for kind, asked in zip(_KINDS, ([], [""] * count, [known] * count, new[first : first + count]), strict=True):
            began = time.perf_counter()
            for source in asked:
                waited[kind].append(_ask(port, source))
                time.sleep(given.pause_s)
            time.sleep(0 if asked else 2)
            windows[kind].append((began, time.perf_counter()))
    streams.end()
    gaps = {
        kind: [gap for at, gap in streams.gaps if any(began <= at - gap and at <= ended for began, ended in within)]
        for kind, within in windows.items()
    }
    return {kind: (1000 * np.array(gaps[kind]), 1000 * np.array(waited[kind])) for kind in _KINDS}


def _ask(port: int, adapter: str) -> float:
    """Seconds until a short answer was there."""
    started = time.perf_counter()
    body = {"prompt": [5, 6, 7], "max_tokens": 2} | ({"dynamic-lora": adapter} if adapter else {})
    with _posted(port, body) as response:
        response.read()
    return time.perf_counter() - started


@contextmanager
def _posted(port: int, body: dict) -> Iterator:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield response
    finally:
        connection.close()


if __name__ == "__main__":
    main()
