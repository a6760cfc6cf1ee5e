"""Servers whose engines run on a Ray cluster, which is one that the server starts on this machine."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multihost.cluster import TWO_DEVICES, Asked
from tests.multihost.test_hosts import LONG, PROMPTS, RULES, alone, bodies, model
from tests.server.replicas import sample
from tests.server.servers import RunningServer, children_of, running_server

pytest.importorskip("ray")

__all__ = ["alone", "model"]  # fixtures


@contextlib.contextmanager
def ray_server(model: Path, log: Path, *flags: str) -> Iterator[RunningServer]:
    environment = TWO_DEVICES | {"RAY_USAGE_STATS_ENABLED": "0"}
    with running_server(model, log, "--worker_distributed_method=ray", *flags, ready=False, **environment) as server:
        server.wait_until_ready(180)
        yield server


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def actors(server: RunningServer) -> list[int]:
    """The processes that have an engine as their child, in the cluster that the server has started."""
    found, parents = [], [server.process.pid]
    while parents:
        for pid, line in children_of(parents.pop()).items():
            parents.append(pid)
            if line.startswith("ray::HostActor"):
                found.append(pid)
    return found


def test_hosts_on_ray_answer_as_one_process_and_an_actor_that_is_lost_ends_its_replica(model, alone, tmp_path):
    with ray_server(model, tmp_path / "log", "--num_hosts=2", "--tensor_parallel_size=4", "--no-warmup") as server:
        assert Asked(server.url, bodies(RULES)).texts() == alone["rules"]
        _, second = actors(server)
        asked = Asked(server.url, bodies(LONG))
        asked.wait_until_under_way()
        os.kill(second, signal.SIGKILL)
        # 503 is for one that came when the engine had gone.
        assert {500} <= {answer["status"] for answer in asked.answers()} <= {500, 503}
        assert server.process.wait(30) == 70
        assert "is lost" in server.log.read_text()


def test_a_replica_on_ray_whose_actor_is_lost_costs_no_request_and_comes_back(model, alone, tmp_path):
    with ray_server(model, tmp_path / "log", "--data_parallel_size=2", "--no-warmup") as server:
        before = set(actors(server))
        asked = Asked(server.url, bodies(LONG))
        asked.wait_until_under_way()
        os.kill(min(before), signal.SIGKILL)
        assert asked.texts() == alone["long"]
        wait_for(lambda: server.get("/ping").json()["replicas_up"] == 2)
        after = set(actors(server))
        assert (len(before), len(after), len(before & after)) == (2, 2, 1)


@pytest.mark.slow
def test_four_hosts_on_ray_answer_as_one_process(model, alone, tmp_path):
    with ray_server(model, tmp_path / "log", "--num_hosts=4", "--tensor_parallel_size=8", "--no-warmup") as server:
        assert len(actors(server)) == 4
        assert Asked(server.url, bodies(RULES)).texts() == alone["rules"]


@pytest.mark.slow
def test_engines_on_ray_hand_requests_over(model, alone, tmp_path):
    flags = ("--num_hosts=2", "--disagg_topo=1,1", "--tensor_parallel_size=2", "--dtype=float32")
    with ray_server(model, tmp_path / "log", *flags) as server:
        assert Asked(server.url, bodies(RULES)).texts() == alone["rules"]
        wait_for(lambda: sample(server, "kv_transfers_total") == len(PROMPTS), 5)
