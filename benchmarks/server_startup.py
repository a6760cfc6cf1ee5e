"""From the start of `hex-llm serve` to the first token of an answer, over HTTP, with the embedded model and defaults.

    .venv/bin/python benchmarks/server_startup.py [--rounds 3]

Cold is with an empty compilation cache, warm with what the cold start left there.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BODY = json.dumps({"messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": True})


def start(cache: str) -> dict[str, float]:
    """Seconds from the start of the process to the port, to /ping's 200 and to the first token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).parent / "hex-llm", "serve", f"--port={port}", f"--compilation_cache_dir={cache}"]
    started = time.monotonic()
    with subprocess.Popen(command, env=os.environ | {"HEX_LLM_LOG_LEVEL": "warning"}) as process:
        try:
            listens = _wait(port, process, lambda status: True) - started
            ready = _wait(port, process, lambda status: status == 200) - started
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("POST", "/v1/chat/completions", BODY, {"Content-Type": "application/json"})
            response = connection.getresponse()
            while b'"content":"' not in (line := response.readline()) or b'"content":""' in line:
                assert line, "the stream ended without a token"
            first = time.monotonic() - started
        finally:
            process.send_signal(signal.SIGTERM)
    return {"answers": listens, "ready": ready, "first token": first}


def _wait(port: int, process: subprocess.Popen, wanted) -> float:
    while process.poll() is None:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/ping")
            status = connection.getresponse().status
            connection.close()
            if wanted(status):
                return time.monotonic()
        time.sleep(0.02)
    raise SystemExit(f"the server ended with {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    times: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for kind, results in times.items():
                results.append(start(cache))
                print(kind, {name: round(value, 2) for name, value in results[-1].items()}, flush=True)
    for kind, results in times.items():
        medians = {name: statistics.median(each[name] for each in results) for name in results[0]}
        print(
            f"{kind}, median of {len(results)}: "
            + ", ".join(f"{name} {value:.2f} s" for name, value in medians.items())
        )


if __name__ == "__main__":
    main()
