"""A server of several hosts, each a command of its own, as a user would give them."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.multihost.machines import Machine, machines
from tests.server.servers import FLAGS, children_of, free_port

ASKER = Path(__file__).parent / "asker.py"
PORT, COORDINATOR_PORT = 7080, 7090
_GET = "import httpx, sys; print(httpx.get(sys.argv[1], timeout=20).text)"
TWO_DEVICES = {"JAX_NUM_CPU_DEVICES": "2"}


class Hosts:
    """The hosts of one server. `processes[0]` is the one that answers HTTP."""

    def __init__(self, found: Sequence[Machine], model: Path, folder: Path, flags: Sequence[str]):
        self._machines = found
        self._folder = folder
        # Where the hosts are all this machine, other tests may have the usual ports.
        port, first = (PORT, COORDINATOR_PORT) if found[0].enter else (free_port(), free_port())
        self.url = f"http://{found[0].address}:{port}"
        self._command = [
            sys.executable, "-m", "hex_llm.server.api_server", f"--model={model}", *FLAGS, *flags,
            f"--host={found[0].address}", f"--port={port}",
            f"--num_hosts={len(found)}", f"--coordinator_address={found[0].address}:{first}",
        ]  # fmt: skip
        self.processes = [self.start(rank) for rank in range(len(found))]

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [*self._machines[rank].enter, *self._command, f"--host_rank={rank}"]
        environment = os.environ | TWO_DEVICES | {"HEXLLM_CLUSTER_KEY": "sesame", "http_proxy": "http://127.0.0.1:1"}
        with (self._folder / f"log-{rank}").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def log(self, rank: int = 0) -> str:
        return (self._folder / f"log-{rank}").read_text()

    def logs(self) -> str:
        return "\n".join(f"--- host {rank}\n{self.log(rank)}" for rank in range(len(self._machines)))

    def wait_until_ready(self, timeout: float = 180) -> None:
        self.wait_for("Ready after", timeout)

    def wait_for(self, text: str, timeout: float, *, rank: int = 0, count: int = 1) -> None:
        """Until a host has logged it so many times."""
        deadline = time.monotonic() + timeout
        while self.log(rank).count(text) < count:
            assert self.processes[0].poll() is None, self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def ask(self, bodies: Sequence[dict[str, Any]]) -> "Asked":
        return Asked(self.url, bodies, self._machines[0])

    def metric(self, name: str) -> float:
        """Whatever its labels are, added up."""
        url = f"{self.url}/metrics"
        command = [*self._machines[0].enter, sys.executable, "-c", _GET, url]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        samples = re.findall(rf"^hexllm:{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert samples, f"there is no {name}"
        return sum(map(float, samples))

    def tasks(self, rank: int) -> list[dict[str, Any]]:
        """What the engines on a host were told."""
        lines, pids = [], [self.processes[rank].pid]
        while pids:
            children = children_of(pids.pop())
            pids += children
            lines += [line for line in children.values() if "hex_llm.engine_process" in line]
        return [engine for line in lines for engine in json.loads(line[line.index("{") :])["engines"]]

    def end(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


class Asked:
    """Requests under way."""

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]], machine: Machine = Machine("127.0.0.1")):  # noqa: B008
        command = [*machine.enter, sys.executable, str(ASKER), url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(bodies)))
        self._process.stdin.close()
        self._process.stdin = None

    def wait_until_under_way(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "under way\n"

    def answers(self, timeout: float = 100) -> list[dict[str, Any]]:
        output, _ = self._process.communicate(timeout=timeout)
        return json.loads(output.splitlines()[-1])

    def texts(self) -> list[str]:
        answers = self.answers()
        assert [answer["status"] for answer in answers] == [200] * len(answers), answers
        return [answer["text"] for answer in answers]


@contextlib.contextmanager
def hosts_serving(number: int, model: Path, folder: Path, *flags: str) -> Iterator[Hosts]:
    with machines(number) as found:
        hosts = Hosts(found, model, folder, flags)
        try:
            hosts.wait_until_ready()
            yield hosts
        finally:
            hosts.end()
