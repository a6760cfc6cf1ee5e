"""The stand-in in a process of its own, for tests; and a real emulator of Cloud Storage."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx

from tests.server.servers import free_port


class RunningStandIn:
    def __init__(self, root: Path, port: int):
        self.root = root
        self.url = f"http://127.0.0.1:{port}"

    @property
    def environment(self) -> dict[str, str]:
        """What has the hub and Cloud Storage be here."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.root / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "",
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "STORAGE_EMULATOR_HOST": self.url,
        }

    def hub(self, id: str) -> Path:
        folder = self.root / "hub" / id
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def bucket(self, path: str) -> Path:
        folder = self.root / "gs" / path
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def set_faults(self, *faults: dict) -> None:
        httpx.post(f"{self.url}/faults", json=faults).raise_for_status()

    def log(self) -> list[dict]:
        return httpx.get(f"{self.url}/log").json()

    def asked_for(self, name: str) -> list[dict]:
        """The requests for bytes of a file."""
        return [each for each in self.log() if name in each["path"] and "api/" not in each["path"]]


@contextlib.contextmanager
def running_stand_in(root: Path) -> Iterator[RunningStandIn]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.download.stand_in", str(root), str(port)])
    try:
        stand_in = RunningStandIn(root, port)
        _wait_for(f"{stand_in.url}/log")
        yield stand_in
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running_emulator(bucket: str, folder: Path, prefix: str) -> Iterator[str]:
    """Its address. Files of the folder are objects of the bucket, with names that begin with `prefix`."""
    port = free_port()
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--quiet", "--in-memory", f"--port={port}"]
    process = subprocess.Popen([*command, f"--default-bucket={bucket}"], stderr=subprocess.DEVNULL)
    url = f"http://localhost:{port}"
    try:
        _wait_for(url)
        for path in folder.iterdir():
            target = f"{url}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(prefix + path.name, safe='')}"
            headers = {"Content-Type": "application/octet-stream"}
            httpx.post(target, content=path.read_bytes(), headers=headers).raise_for_status()
        yield url
    finally:
        process.kill()
        process.wait()


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(url)
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)
