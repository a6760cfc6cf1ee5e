"""A request can end in every phase: while its body comes, while it is tokenized, while it is answered."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import orjson
import pytest

from tests.checkpoints import write_llama
from tests.server.servers import RunningServer, running_server

FLAGS = ("--drain_timeout_s=1", "--request_timeout_s=5", "--max_decode_seqs=64", "--num_blocks=2048")


@pytest.fixture
def server(tmp_path) -> Iterator[RunningServer]:
    with running_server(write_llama(tmp_path / "model"), tmp_path / "log", *FLAGS) as server:
        yield server


@contextlib.contextmanager
def no_text_process(server: RunningServer) -> Iterator[None]:
    """Meanwhile nothing is tokenized."""
    (pid,) = [pid for pid, line in server.children().items() if "hex_llm.text.process" in line]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def post(server: RunningServer, body: bytes, *, length: int | None = None) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port))
    size = len(body) if length is None else length
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    client.sendall(head.encode() + body)
    client.settimeout(20)
    return client


def read_error(client: socket.socket) -> tuple[int, str]:
    """The status, and the error's code."""
    answer = b""
    while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
        data = client.recv(2**16)
        assert data, answer
        answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), orjson.loads(body)["error"]["code"]


def wait_for(server: RunningServer, sample: str, value: float, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while server.metrics()[sample] != value:
        assert time.monotonic() < deadline, f"{sample} is {server.metrics()[sample]}"
        time.sleep(0.05)


ASKED = orjson.dumps({"prompt": "Once upon a time", "max_tokens": 4})


def test_who_leaves_while_the_prompt_is_tokenized_leaves_nothing_behind(server):
    with no_text_process(server):
        client = post(server, ASKED)
        wait_for(server, "hexllm:admitted_sequences", 1, 5)
        client.close()
        wait_for(server, "hexllm:admitted_sequences", 0, 1.5)
        wait_for(server, "hexllm:requests_in_flight", 0, 1.5)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_requests_time_counts_while_its_prompt_is_tokenized(server):
    with no_text_process(server), post(server, ASKED) as client:
        assert read_error(client) == (408, "request_timeout")


def test_when_the_time_to_drain_is_up_requests_in_every_phase_are_told(server):
    with (
        no_text_process(server),
        post(server, ASKED) as tokenized,
        post(server, ASKED[:5], length=len(ASKED)) as half_sent,
    ):
        wait_for(server, "hexllm:requests_in_flight", 2, 5)
        server.process.send_signal(signal.SIGTERM)
        assert read_error(tokenized) == (503, "server_shutdown")
        assert read_error(half_sent) == (503, "server_shutdown")
        assert server.process.wait(10) == 0
    assert "Traceback" not in server.log.read_text()


def test_a_large_answer_does_not_hold_up_the_others(server):
    body = {"prompt": [5], "max_tokens": 200, "n": 64, "logprobs": 20, "ignore_eos": True}
    answers = []
    asker = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
    asker.start()
    slowest = 0.0
    with httpx.Client() as client:
        while asker.is_alive():
            started = time.monotonic()
            client.get(server.url + "/ping")
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.01)
    assert answers[0].status_code in (200, 408)
    if answers[0].status_code == 200:
        assert len(answers[0].json()["choices"]) == 64
    assert slowest < 1.0  # on a machine with nothing else to do it is a tenth of that


def test_what_the_log_says_of_requests_has_their_text_only_where_it_is_verbose(tmp_path):
    folder = write_llama(tmp_path / "model")
    for verbose in ("false", "true"):
        log = tmp_path / verbose
        with running_server(folder, log, HEX_LLM_VERBOSE_LOG=verbose) as server:
            server.post("/v1/completions", {"prompt": "a secret recipe", "max_tokens": 1})
        assert ("a secret recipe" in log.read_text()) == (verbose == "true")
        assert "POST /v1/completions 200 completed" in log.read_text()
