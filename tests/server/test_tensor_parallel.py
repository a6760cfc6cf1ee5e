"""Engines of two devices each behind one server: 1,000 requests, none lost, evenly shared out, answered as one device
does."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoints import write_llama
from tests.server.load import COMPLETED, random_body, run_load
from tests.server.servers import RunningServer, running_server

NUM_REQUESTS = 1000
GREEDY = [
    {"prompt": [5 + number] * (1 + 3 * number), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    for number in range(12)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


def texts(server: RunningServer) -> list[str]:
    """Of requests that are under way together."""
    with ThreadPoolExecutor(len(GREEDY)) as pool:
        answers = list(pool.map(lambda body: server.post("/v1/completions", body), GREEDY))
    return [answer.json()["choices"][0]["text"] for answer in answers]


def test_two_replicas_of_two_devices_share_1000_requests_evenly_and_lose_none(folder, tmp_path):
    flags = ["--data_parallel_size=2", "--tensor_parallel_size=2", "--dtype=float32", "--disable_log_requests"]
    rng = random.Random(0)
    bodies = [random_body(rng, 128, 320, 24) for _ in range(NUM_REQUESTS)]
    with running_server(folder, tmp_path / "log", *flags, JAX_NUM_CPU_DEVICES="4") as server:
        ledger = asyncio.run(run_load(server.url, bodies, concurrency=32))
        metrics = server.metrics()
        shared = texts(server)
    assert ledger.outcomes == {COMPLETED: NUM_REQUESTS}, ledger.complaints
    sequences = [metrics[f'hexllm:replica_requests_total{{replica="{number}"}}'] for number in (0, 1)]
    assert sum(sequences) == sum(body["n"] for body in bodies)
    assert max(sequences) <= 1.1 * sum(sequences) / 2, sequences
    with running_server(folder, tmp_path / "log", "--dtype=float32") as server:
        assert shared == texts(server)
