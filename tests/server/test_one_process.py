"""All engines of a server in one process, where blocks go from device to device: they answer as one that does all, and
end together."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoints import write_llama
from tests.server.disaggregated import checked_server, settled
from tests.server.replicas import Load, engines, generated, run_until, stop, wait_until_asked
from tests.server.servers import RunningServer

FLAGS = (
    "--dtype=float32",
    "--max_model_len=256",
    "--num_blocks=512",
    "--block_size=8",
    "--max_decode_seqs=8",
    "--prefill_len_padding=128",
    "--max_num_batched_tokens=128",
    "--decode_blocks_padding=1",
    "--disable_log_requests",
)
PLAIN = ("--enable_chunked_prefill", "--enable_prefix_cache_hbm")
# Greedy and drawn by seed, one answer and two, in one step and in several.
ASKED = [
    {
        "prompt": [5 + number, *((7 * place + number * place) % 250 + 3 for place in range(18 * number))],
        "max_tokens": 24,
        "ignore_eos": True,
        "temperature": number % 2,
        "seed": number,
        "n": 1 + number % 4 // 3,
    }
    for number in range(12)
]
NUM_ANSWERS = sum(body["n"] for body in ASKED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


def answers(server: RunningServer) -> list[list[str]]:
    """To requests that are under way together."""
    with ThreadPoolExecutor(len(ASKED)) as pool:
        given = list(pool.map(lambda body: server.post("/v1/completions", body), ASKED))
    return [[choice["text"] for choice in answer.json()["choices"]] for answer in given]


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory) -> list[list[str]]:
    with checked_server(folder, tmp_path_factory.mktemp("plain") / "log", *FLAGS, *PLAIN, devices=1) as server:
        return answers(server)


def check(server: RunningServer, plain: list[list[str]], num_engines: int) -> None:
    pids = engines(server)
    assert [*pids] == [*range(num_engines)]
    assert len({*pids.values()}) == 1
    assert answers(server) == plain
    assert answers(server) == plain  # with what is cached since
    counts = settled(server)
    assert (counts.transfers, counts.lost) == (2 * NUM_ANSWERS, 0)
    assert counts.num_bytes > 0


def test_engines_of_two_devices_each_answer_as_one_that_does_all(folder, plain, tmp_path):
    flags = ("--disagg_topo=2,1", "--kv_transfer_path=device", "--tensor_parallel_size=2")
    with checked_server(folder, tmp_path / "log", *FLAGS, *flags, devices=6) as server:
        check(server, plain, 3)


def test_engines_of_one_process_answer_as_one_that_does_all_and_end_together(folder, plain, tmp_path):
    flags = ("--disagg_topo=1,1", "--kv_transfer_path=device")
    with checked_server(folder, tmp_path / "log", *FLAGS, *flags, devices=2) as server:
        check(server, plain, 2)
        before, pid = generated(server), engines(server)[0]
        stop([pid])
        load = Load(
            server,
            [body | {"prompt": body["prompt"][:40], "max_tokens": 200, "n": 1, "stream": number > 5}
             for number, body in enumerate(ASKED)],
        )  # fmt: skip
        wait_until_asked(server, len(ASKED))
        run_until([pid], lambda: generated(server) > before, "there are no tokens")
        os.kill(pid, signal.SIGKILL)
        errors = load.errors()
        assert all("The engine stopped" in str(error) for error in errors), errors
        assert server.process.wait(10) == 70
        log = server.log.read_text()
        assert "The process of the engines was ended by signal 9." in log
        assert "is started again" not in log
