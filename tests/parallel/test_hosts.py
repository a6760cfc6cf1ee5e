"""Two processes as one JAX world."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.server.servers import free_port

SCRIPT = Path(__file__).parent / "world_host.py"


def test_hosts_agree_keep_what_they_compile_and_end_when_they_are_told(tmp_path):
    coordinator = f"127.0.0.1:{free_port()}"
    environment = os.environ | {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "http_proxy": "http://127.0.0.1:1",  # nobody is there, and nobody may be asked for
    }
    hosts = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), coordinator, str(rank), number, str(tmp_path / str(rank))],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for rank, number in enumerate(("17", "12"))
    ]  # fmt: skip
    try:
        for host in hosts:
            assert next(line for line in host.stdout if not line.startswith("[Gloo]")) == "least 12\n"
        for rank in range(2):
            assert any((tmp_path / str(rank)).iterdir()), f"host {rank} has kept nothing"
        hosts[1].terminate()
        assert hosts[1].wait(10) == -signal.SIGTERM
    finally:
        for host in hosts:
            host.kill()
            host.communicate()
