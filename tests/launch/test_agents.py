"""Host 0, which is the test, and agents on other hosts, which are processes of this machine."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from hex_llm.config import Config
from hex_llm.errors import StartError
from hex_llm.launch import agents as agents_module
from hex_llm.launch.addresses import Address, Place
from hex_llm.launch.agent import hello_of
from hex_llm.launch.agent_wire import difference
from hex_llm.launch.agents import Agents
from hex_llm.launch.task import EngineTask, Task
from tests.server.servers import children_of, free_port

SCRIPT = Path(__file__).parent / "agent_host.py"
KEY = "sesame"


class Cluster:
    def __init__(self, folder: Path):
        self.folder = folder
        self.address = Address("127.0.0.1", free_port())
        self.config = Config(num_hosts=2, coordinator_address=str(self.address))
        self.agents: Agents | None = None
        self.processes: list[subprocess.Popen[str]] = []

    def gather(self, seconds: float = 60) -> Agents:
        place = Place(0, self.config.num_hosts, self.address)
        self.agents = Agents(place, hello_of(self.config, 0, "127.0.0.1"), KEY.encode(), gather=seconds)
        return self.agents

    def agent(self, *flags: str, rank: int = 1, key: str = KEY) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), str(self.folder / f"tasks-{rank}"), "--num_hosts=2"]
        command += [f"--coordinator_address={self.address}", f"--host_rank={rank}", *flags]
        environment = os.environ | {"HEXLLM_CLUSTER_KEY": key}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.processes.append(process)
        return process

    def tasks(self, rank: int = 1) -> list[dict]:
        return [json.loads(line) for line in (self.folder / f"tasks-{rank}").read_text().splitlines()]

    def task(self, replica: int = 0, pages: str = "", **fields) -> Task:
        return Task((EngineTask(self.config, replica, pages=pages),), fronts=("tcp:127.0.0.1:1",), **fields)


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    for process in cluster.processes:
        process.kill()
        process.communicate()
    if cluster.agents is not None:
        cluster.agents.close()


def wait_for[Value](find: Callable[[], Value | None], seconds: float = 20) -> Value:
    deadline = time.monotonic() + seconds
    while not (value := find()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def end_of(process: subprocess.Popen[str], seconds: float = 20) -> tuple[int, str]:
    _, errors = process.communicate(timeout=seconds)
    return process.returncode, errors


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


def begin(cluster: Cluster, replica: int = 0, host: int = 1):
    """A process on another host, once that has begun with it."""
    child = cluster.agents.start(host, cluster.task(replica=replica), {})
    wait_for(lambda: child.poll() is not None or child.is_begun)
    return child


def test_what_is_to_start_waits_for_all_hosts_and_learns_their_addresses(cluster):
    agents = cluster.gather()
    steps, coordinator = agents.addresses(1, 2)
    child = agents.start(1, cluster.task(steps=f"tcp:{steps}", coordinator=coordinator), {"A": "1"})
    time.sleep(0.3)
    assert child.poll() is None
    assert not child.is_begun
    cluster.agent()
    wait_for(lambda: child.poll() is None and child.is_begun)
    (told,) = wait_for(lambda: (cluster.folder / "tasks-1").exists() and cluster.tasks())
    port = cluster.address.port
    assert told["task"]["steps"] == f"tcp:127.0.0.1:{port + 1}"
    assert told["task"]["coordinator"] == f"127.0.0.1:{port + 2}"
    assert told["environment"] == {"A": "1", "HEX_LLM_CLUSTER_KEY": KEY}


def test_the_key_is_not_sent(cluster, monkeypatch):
    agents, sent = cluster.gather(), []
    cluster.agent()
    monkeypatch.setattr(agents_module, "Start", lambda *message: sent.append(message) or agents_module.End(0))
    child = agents.start(1, cluster.task(), {"HEX_LLM_CLUSTER_KEY": KEY, "A": "1"})
    wait_for(lambda: child.poll() is None and child.is_begun)
    assert sent[0][2] == {"A": "1"}


def test_ports_are_those_that_no_process_has(cluster):
    agents, port = cluster.gather(), cluster.address.port

    def ports() -> list[int]:
        return [int(address.rpartition(":")[2]) for address in agents.addresses(0, 2)]

    def start():
        steps, coordinator = agents.addresses(0, 2)
        return agents.start(0, cluster.task(steps=f"tcp:{steps}", coordinator=coordinator), {})

    first, _ = start(), start()
    assert ports() == [port + 5, port + 6]
    first.end()
    assert ports() == [port + 1, port + 2]


def test_each_engine_that_hands_blocks_over_has_a_port_of_its_own_on_its_host(cluster):
    agents, port = cluster.gather(), cluster.address.port

    def start(host: int):
        return agents.start(host, cluster.task(pages=agents.pages_address(host)), {})

    here, there = start(0), start(1)
    cluster.agent()
    wait_for(lambda: there.poll() is None and there.is_begun)
    (told,) = wait_for(lambda: (cluster.folder / "tasks-1").exists() and cluster.tasks())
    assert told["task"]["engines"][0]["pages"] == f"tcp:127.0.0.1:{port + 2}"
    here.end()
    assert here.poll() is not None
    assert agents.pages_address(1).endswith(f":{port + 1}")


def test_how_a_process_there_ended_is_known_here(cluster):
    cluster.gather()
    cluster.agent()
    child = begin(cluster, replica=7)
    assert wait_for(child.poll) == 7


def test_a_process_there_can_be_ended_and_ends_with_its_host(cluster):
    cluster.gather()
    agent = cluster.agent()
    child = begin(cluster)
    (pid,) = wait_for(lambda: children_of(agent.pid))
    child.end()
    assert wait_for(child.poll) == -signal.SIGKILL
    assert pid not in children_of(agent.pid)
    begin(cluster)
    (pid,) = wait_for(lambda: children_of(agent.pid))
    agent.kill()
    agent.wait()
    wait_for(lambda: not is_alive(pid))


def test_a_host_that_is_lost_takes_its_processes_along_and_may_come_back(cluster):
    agents = cluster.gather()
    agent = cluster.agent()
    child = begin(cluster)
    agent.kill()
    assert wait_for(child.poll, 5) == 70
    with pytest.raises(StartError, match="host 1 is not connected"):
        agents.start(1, cluster.task(), {})
    cluster.agent()

    def start():
        with contextlib.suppress(StartError):
            return agents.start(1, cluster.task(replica=3), {})

    again = wait_for(start)
    assert wait_for(again.poll) == 3


def test_an_agent_ends_in_order_with_host_0(cluster):
    agents = cluster.gather()
    agent = cluster.agent()
    begin(cluster)
    wait_for(lambda: children_of(agent.pid))
    agents.close()
    code, errors = end_of(agent, 5)
    assert code == 0
    assert "Host 0 has ended; this host ends, too." in errors


def test_an_agent_that_loses_host_0_says_so(cluster):
    agents = cluster.gather()
    agent = cluster.agent()
    begin(cluster)
    agents._hosts[1].peer.close()
    code, errors = end_of(agent, 5)
    assert code == 70
    assert re.search(r"^hex-llm: host 0 at 127\.0\.0\.1:\d+ is lost: its connection has ended\.$", errors, re.MULTILINE)


def test_an_agent_that_is_told_to_stop_waits_for_host_0_and_not_after_a_second_signal(cluster):
    cluster.gather()
    agent = cluster.agent()
    begin(cluster)
    wait_for(lambda: children_of(agent.pid))
    agent.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert agent.poll() is None
    agent.send_signal(signal.SIGTERM)
    code, errors = end_of(agent, 5)
    assert code == 0
    assert "Told to stop: waiting for host 0 to end, for at most 30 s." in errors


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--max_model_len=64"], "it was started with --max_model_len=64, and host 0 with --max_model_len=None"),
        (["--port=1"], None),  # which only host 0 has a use for
    ],
)
def test_a_host_with_other_flags_cannot_take_part(cluster, flags, reason):
    agents = cluster.gather()
    child = agents.start(1, cluster.task(replica=5), {})
    agent = cluster.agent(*flags)
    code = wait_for(child.poll)
    if reason is None:
        assert code == 5
    else:
        assert code == 2
        ended, errors = end_of(agent)
        assert (ended, errors.splitlines()[-1]) == (2, f"hex-llm: Host 1 at 127.0.0.1 cannot take part: {reason}.")


def test_a_host_with_another_version_cannot_take_part():
    first = hello_of(Config(), 0, "10.0.0.1")
    host = msgspec.structs.replace(first, rank=1, versions="hex-llm 0, jax 0")
    assert difference(host, first) == f"it has hex-llm 0, jax 0, and host 0 has {first.versions}"
    assert first.versions.startswith("hex-llm ")


def test_a_second_host_of_a_rank_is_refused_and_the_first_stays(cluster):
    cluster.gather()
    cluster.agent()
    child = begin(cluster)
    code, errors = end_of(cluster.agent())
    assert code == 2
    assert "there is one of that rank at 127.0.0.1" in errors
    assert child.poll() is None


def test_a_host_with_another_key_is_refused(cluster):
    cluster.gather()
    code, errors = end_of(cluster.agent(key="other"))
    assert code == 2
    assert f"Host 0 at {cluster.address} does not let this host in" in errors


def test_hosts_that_do_not_come_end_the_start(cluster, caplog):
    agents = cluster.gather(0.3)
    child = agents.start(0, cluster.task(), {})
    assert wait_for(child.poll) == 1
    assert f"Of --num_hosts=2, host 1 has not connected to {cluster.address} within 0.3 s." in caplog.text
