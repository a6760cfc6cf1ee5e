"""Several engines behind one server: what they share, and what happens when one of them goes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import write_llama
from tests.faults.oracles import check_oracles
from tests.faults.suite import record
from tests.monitoring.page import check_metrics
from tests.server.replicas import (
    Load,
    Pings,
    engines,
    generated,
    go_on,
    run_until,
    sample,
    stop,
    tasks,
    wait_for,
    wait_until_asked,
    wait_until_up,
)
from tests.server.servers import FLAGS, RunningServer, free_port, running_server

TWO_DEVICES = {"JAX_NUM_CPU_DEVICES": "2"}
NUM_ASKED = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("log") / "log"
    with running_server(folder, log, "--data_parallel_size=2", "--step_timeout_s=5", **TWO_DEVICES) as server:
        yield server


def bodies(count: int = NUM_ASKED, tokens: int = 200) -> list[dict]:
    """Streamed and whole, greedy and drawn by seed; no two alike."""
    return [
        {
            "prompt": [5 + number, 6, 7, 8 + number % 5],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": bool(number % 2),
            "temperature": number // 2 % 2,
            "seed": number,
        }
        for number in range(count)
    ]


def load_both(server: RunningServer, victim: int) -> Load:
    """Requests that are under way on both replicas; of the victim, which is stopped, they have some tokens."""
    before = generated(server)
    stop(engines(server).values())
    load = Load(server, bodies())
    wait_until_asked(server, NUM_ASKED)
    run_until([victim], lambda: generated(server) > before + NUM_ASKED, "there are no tokens")
    go_on({*engines(server).values()} - {victim})
    return load


def sent(server: RunningServer) -> list[float]:
    metrics = server.metrics()
    return [metrics.get(f'hexllm:replica_requests_total{{replica="{replica}"}}', 0) for replica in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(server) -> list[tuple[str, str]]:
    return Load(server, bodies()).answers()


def test_requests_are_shared_out_evenly_and_a_request_gets_the_same_answer_wherever_it_goes(server, undisturbed):
    before = sent(server)
    stop(engines(server).values())  # or who answers faster is sent more
    again = Load(server, bodies())
    wait_until_asked(server, NUM_ASKED)
    go_on(engines(server).values())
    assert again.answers() == undisturbed
    shares = [now - then for now, then in zip(sent(server), before, strict=True)]
    assert sum(shares) == NUM_ASKED
    assert min(shares) >= NUM_ASKED / 2 - 2
    assert server.get("/ping").json() == {"status": "ready", "replicas": 2, "replicas_up": 2}
    check_metrics(server)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_when_a_replica_goes_the_other_takes_over_and_it_comes_back(server, undisturbed, number):
    victim, other = engines(server)[1], engines(server)[0]
    replays = sample(server, "replays_total")
    restarts = sample(server, 'replica_restarts_total{replica="1"}')
    with Pings(server) as pings:
        load = load_both(server, victim)
        os.kill(victim, number)
        assert load.answers() == undisturbed
        assert sample(server, "replays_total") > replays
        back = wait_until_up(server)
    assert pings.codes == {200}
    assert engines(server)[0] == other
    assert engines(server)[1] != victim
    assert sample(server, 'replica_restarts_total{replica="1"}') == restarts + 1
    assert sample(server, "requests_in_flight") == 0
    before = sent(server)
    assert Load(server, bodies(tokens=5)).answers()
    assert min(now - then for now, then in zip(sent(server), before, strict=True)) > 0
    check_oracles(server)
    name = signal.Signals(number).name
    record(
        "F28", f"{name} of one of two copies: {NUM_ASKED} of {NUM_ASKED} as undisturbed, up again after {back:.1f} s"
    )


def test_sigterm_lets_requests_of_all_replicas_finish(server, undisturbed):
    children = engines(server)
    door = Path(tasks(server)[children[0]]["fronts"][0].removeprefix("unix:"))
    assert door.parent.stat().st_mode & 0o777 == 0o700
    load = load_both(server, children[0])
    os.kill(children[0], signal.SIGCONT)
    server.process.send_signal(signal.SIGTERM)
    assert load.answers() == undisturbed
    assert server.process.wait(10) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children.values())
    assert not door.parent.exists()


def test_several_http_processes_have_several_engines_and_end_when_all_of_these_are_killed(folder, tmp_path):
    flags = ["--data_parallel_size=2", "--api_server_count=2"]
    with running_server(folder, tmp_path / "log", *flags, keys=["sk-one"], **TWO_DEVICES) as server:
        for pid in engines(server).values():
            assert b"sk-one" not in Path(f"/proc/{pid}/environ").read_bytes()
        expected = Load(server, bodies(8)).answers()
        load = Load(server, bodies(8))
        time.sleep(0.3)
        os.kill(engines(server)[0], signal.SIGKILL)
        assert load.answers() == expected
        wait_for(lambda: len(engines(server)) == 2, 10, "the replica is not started again")
        # Both HTTP processes are asked by this, mostly: each request is a connection of its own.
        wait_for(lambda: all(wait_until_up(server) < 0.5 for _ in range(8)), 60, "it does not come back everywhere")
        asked = Load(server, bodies(8))
        time.sleep(0.3)
        for pid in engines(server).values():
            os.kill(pid, signal.SIGKILL)
        assert server.process.wait(20) == 70
        assert all(error is None or "engine_dead" in str(error) for error in asked.errors())


def test_a_replica_that_cannot_start_ends_the_server_with_its_reason(folder, tmp_path):
    flags = ["--data_parallel_size=2", "--max_model_len=100000"]
    with running_server(folder, tmp_path / "log", *flags, ready=False, **TWO_DEVICES) as server:
        assert server.process.wait(60) == 2
    assert "beyond the model's context length" in server.log.read_text().splitlines()[-1]


def test_more_replicas_than_devices_are_refused_at_once(folder):
    command = [sys.executable, "-m", "hex_llm.server.api_server", f"--model={folder}", f"--port={free_port()}", *FLAGS]
    started = time.monotonic()
    done = subprocess.run(
        [*command, "--tensor_parallel_size=2", "--data_parallel_size=2"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "3"},
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("hex-llm: num_request_devices 4 > num_available_devices 3")
    assert time.monotonic() - started < 15
