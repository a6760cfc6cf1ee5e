"""Servers of several hosts of two devices each: they answer as one process does, and what becomes of them when a host
is lost under load."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hex_llm import LLM, Config, SamplingParams
from tests.checkpoints import write_llama
from tests.faults.suite import record
from tests.multihost.cluster import hosts_serving
from tests.server.servers import FLAGS, children_of

PROMPTS = [[5 + number, 6, 7, 8 + number % 5, *range(20, 20 + 9 * number)] for number in range(6)]
RULES: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "repetition_penalty": 1.3, "min_tokens": 24}
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 180, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model) -> dict[str, list[str]]:
    """What one process on one device answers."""
    llm = LLM(config=Config.from_args([f"--model={model}", *FLAGS]))

    def texts(settings: dict[str, Any]) -> list[str]:
        return [answer.outputs[0].text for answer in llm.generate(PROMPTS, SamplingParams(**settings), progress=False)]

    return {"rules": texts(RULES), "long": texts(LONG)}


def bodies(settings: dict[str, Any], times: int = 1) -> list[dict[str, Any]]:
    return [settings | {"prompt": prompt} for prompt in PROMPTS * times]


def test_two_hosts_answer_as_one_process_and_one_that_is_lost_ends_them_all(model, alone, tmp_path):
    with hosts_serving(2, model, tmp_path, "--tensor_parallel_size=4") as hosts:
        assert hosts.ask(bodies(RULES)).texts() == alone["rules"]
        asked = hosts.ask(bodies(LONG))
        asked.wait_until_under_way()
        started = time.monotonic()
        hosts.processes[1].kill()
        answers = asked.answers()
        # 503 is for one that came when the engine had gone.
        assert {500} <= {answer["status"] for answer in answers} <= {500, 503}
        assert any("The engine stopped while it worked on the request." in answer["error"] for answer in answers)
        assert hosts.processes[0].wait(30) == 70
        took = time.monotonic() - started
        assert took < 30
        record("F28", f"one of two hosts killed: everybody told, the other ends with exit 70 after {took:.1f} s")
        assert re.search(r"[Hh]ost 1 (of replica 0 )?at \S+ is lost: .+\.\n", hosts.log())


def test_four_hosts_answer_as_one_process_and_end_in_order(model, alone, tmp_path):
    with hosts_serving(4, model, tmp_path, "--tensor_parallel_size=8", "--no-warmup") as hosts:
        assert hosts.ask(bodies(RULES)).texts() == alone["rules"]
        hosts.processes[0].terminate()
        assert [process.wait(15) for process in hosts.processes] == [0, 0, 0, 0]
        assert "lost" not in hosts.logs()


def test_replicas_on_two_hosts_lose_no_request_with_a_host_which_may_come_back(model, alone, tmp_path):
    flags = ("--tensor_parallel_size=2", "--data_parallel_size=2")
    with hosts_serving(2, model, tmp_path, *flags) as hosts:
        asked = hosts.ask(bodies(LONG))
        asked.wait_until_under_way()
        hosts.processes[1].kill()
        assert asked.texts() == alone["long"]
        record("F28", f"a host with one of two replicas killed: {len(PROMPTS)} requests, 0 lost, all identical")
        hosts.wait_for("Host 1 at", 30)
        hosts.processes[1] = hosts.start(1)
        hosts.wait_for("Engine built", 60, rank=1, count=2)
        assert hosts.ask(bodies(RULES, times=2)).texts() == alone["rules"] * 2


@pytest.mark.slow
def test_a_host_that_hangs_ends_the_replica_within_30_seconds(model, tmp_path):
    with hosts_serving(2, model, tmp_path, "--tensor_parallel_size=4", "--no-warmup") as hosts:
        asked = hosts.ask(bodies(LONG))
        asked.wait_until_under_way()
        started = time.monotonic()
        # Under the agent, or under what entered the machine for it.
        tree = [pid for child in children_of(hosts.processes[1].pid) for pid in (child, *children_of(child))]
        for pid in tree:
            os.kill(pid, signal.SIGSTOP)
        answers, seconds = asked.answers(), time.monotonic() - started
        assert {500} <= {answer["status"] for answer in answers} <= {500, 503}
        assert hosts.processes[0].wait(30) == 70
        assert 15 < seconds < 30
        record("F28", f"one of two hosts stopped: {len(answers)} requests told after {seconds:.1f} s, exit 70")
