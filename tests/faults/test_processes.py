"""What happens when a part goes: nothing that was asked goes without an answer, and nothing is left behind."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.faults.suite import record, sized
from tests.server.load import COMPLETED, LOST, Ledger, random_body, run_load
from tests.server.replicas import wait_for
from tests.server.servers import FLAGS, RunningServer, children_of, free_port, is_gone, running_server

ROUNDS = sized(2, 20)


@pytest.fixture(scope="module")
def kills() -> list[tuple[float, float]]:
    """Of each round, when /ping and when the last request knew."""
    return []


class Load:
    """Requests from a thread of their own, while the test does something to the server."""

    def __init__(self, server: RunningServer, bodies: list[dict], concurrency: int):
        self.ledger: Ledger
        self._thread = threading.Thread(target=self._run, args=(server, bodies, concurrency))
        self._thread.start()

    def _run(self, server: RunningServer, bodies: list[dict], concurrency: int) -> None:
        self.ledger = asyncio.run(run_load(server.url, bodies, concurrency=concurrency, headers=server.headers))

    def join(self) -> Ledger:
        self._thread.join(600)
        assert not self._thread.is_alive(), "a request has no answer"
        return self.ledger


def long_bodies(count: int, tokens: int = 200) -> list[dict]:
    return [
        {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": bool(number % 2)}
        for number in range(count)
    ]


def load_all(server: RunningServer, count: int, tokens: int = 200) -> Load:
    """So many requests, all of them under way at the same time: none can end before the last has come."""
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        load = Load(server, long_bodies(count, tokens), concurrency=count)
        wait_until_busy(server, count)
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    return load


def wait_until_busy(server: RunningServer, requests: int) -> None:
    seconds = 20 + requests / 100
    wait_for(lambda: server.metrics()["hexllm:requests_in_flight"] >= requests, seconds, "requests did not arrive")


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_when_the_engine_is_killed_every_request_is_told_at_once(folder, tmp_path, seed, kills):
    rng = random.Random(seed)
    with running_server(folder, tmp_path / "log") as server:
        children = list(server.children())
        bodies = [random_body(rng, 256, 250, 60) for _ in range(20)] + long_bodies(80)
        load = Load(server, bodies, concurrency=32)
        wait_until_busy(server, 8)
        time.sleep(rng.uniform(0, 0.5))
        os.kill(server.engine_pid, signal.SIGKILL)
        killed = time.monotonic()
        noticed = wait_for(lambda: server.get("/ping").status_code == 503, 2, "/ping did not notice")
        late = server.post("/v1/completions", {"prompt": "a"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
        assert server.get("/live").status_code == 200
        assert server.metrics()['hexllm:engine_deaths_total{reason="died"}'] == 1
        assert server.process.wait(10) == 70
        ledger = load.join()
    told = ledger.last_answer - killed
    assert {*ledger.outcomes} <= {COMPLETED, "engine_dead"}, ledger.complaints
    assert ledger.outcomes["engine_dead"] > 0
    assert ledger.total == len(bodies)
    assert told < 5
    wait_for(lambda: all(map(is_gone, children)), 2, "a process is left over")
    assert "The engine's process" in server.log.read_text()
    kills.append((noticed, told))
    if len(kills) == ROUNDS:
        pings, tellings = map(max, zip(*kills, strict=True))
        record(
            "F1",
            f"{ROUNDS} of {ROUNDS} kills: /ping 503 within {pings:.2f} s, all told within {tellings:.2f} s, exit 70",
        )


def test_sigterm_lets_all_requests_finish_and_takes_no_more(folder, tmp_path):
    count, tokens, seqs = sized((200, 200, 8), (10_000, 20, 64))
    flags = (f"--max_decode_seqs={seqs}", f"--max_queued_requests={count}", f"--max_connections={count + 500}")
    times = ("--drain_timeout_s=600", "--queue_timeout_s=600")
    with running_server(folder, tmp_path / "log", *flags, *times) as server:
        children = list(server.children())
        load = load_all(server, count, tokens)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)  # as `timeout` does: to the process, and to its group
        noticed = wait_for(lambda: server.get("/ping").status_code == 503, sized(0.5, 0.2), "/ping did not notice")
        assert server.get("/live").status_code == 200
        refusals = 0
        while server.process.poll() is None:
            try:
                answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
            except httpx.TransportError:
                break  # it has ended
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
            assert answer.headers["connection"] == "close"
            refusals += 1
            time.sleep(0.05)
        assert server.process.wait(2) == 0  # nobody was turned away before
        ledger = load.join()
    assert ledger.outcomes == {COMPLETED: count}, ledger.complaints
    assert refusals > 0
    record(
        "F6",
        f"{count:,} requests under way at SIGTERM, 0 lost; /ping 503 after {noticed:.2f} s; {refusals} new ones "
        "refused with 503; exit 0",
    )
    wait_for(lambda: all(map(is_gone, children)), 2, "a process is left over")


def test_when_the_time_to_drain_is_up_the_rest_is_told(folder, tmp_path):
    with running_server(folder, tmp_path / "log", "--drain_timeout_s=0.3", "--max_decode_seqs=1") as server:
        load = load_all(server, 50)
        server.process.send_signal(signal.SIGTERM)
        told_at = time.monotonic()
        assert server.process.wait(0.3 + 5) == 0
        took = time.monotonic() - told_at
        ledger = load.join()
    assert ledger.outcomes["server_shutdown"] > 20
    assert ledger.total == 50
    assert ledger.outcomes[LOST] == 0, ledger.complaints
    told, done = ledger.outcomes["server_shutdown"], ledger.outcomes[COMPLETED]
    record("F7", f"of 50, {done} completed in time and {told} told server_shutdown; exit 0 {took:.1f} s after SIGTERM")


def test_a_second_sigterm_does_not_wait(folder, tmp_path):
    with running_server(folder, tmp_path / "log", "--max_decode_seqs=1") as server:
        load = load_all(server, 50)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        told_at = time.monotonic()
        assert server.process.wait(3) == 0
        took = time.monotonic() - told_at
        assert load.join().outcomes[LOST] == 0
    record("F7", f"exit 0 {took:.1f} s after a second SIGTERM")


def test_an_idle_server_ends_at_once(folder, tmp_path):
    with running_server(folder, tmp_path / "log") as server:
        server.process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        assert server.process.wait(5) == 0
    record("F5", f"exit 0 after {time.monotonic() - told:.1f} s")


def test_a_server_that_starts_answers_503_and_ends_when_told(folder, tmp_path):
    with running_server(folder, tmp_path / "log", "--compilation_cache_dir=", ready=False) as server:
        answers = []

        def answer() -> bool:
            try:
                answers.append(server.get("/ping"))
            except httpx.TransportError:
                return False
            return True

        wait_for(answer, 20, "nobody listens")
        assert answers[0].status_code == 503
        assert answers[0].json()["status"] == "starting"
        refusal = server.post("/v1/completions", {"prompt": "a"})
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "starting")
        assert "retry-after" in refusal.headers
        children = list(server.children())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(8) == 0
    wait_for(lambda: all(map(is_gone, children)), 2, "a process is left over")


def test_an_engine_that_ends_before_it_has_connected_ends_the_server(folder, tmp_path):
    with running_server(folder, tmp_path / "log", ready=False) as server:
        wait_for(server.children, 10, "no process was started")
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.process.wait(15) == 70
    assert children_of(server.process.pid) == {}


def test_an_engine_that_hangs_is_given_up(folder, tmp_path):
    with running_server(folder, tmp_path / "log", "--step_timeout_s=3") as server:
        load = Load(server, long_bodies(40), concurrency=16)
        wait_until_busy(server, 8)
        engine = server.engine_pid
        os.kill(engine, signal.SIGSTOP)
        stopped = time.monotonic()
        noticed = wait_for(lambda: server.get("/ping").status_code == 503, 10, "/ping did not notice")
        assert server.process.wait(20) == 71
        took = time.monotonic() - stopped
        ledger = load.join()
    assert ledger.outcomes["engine_dead"] > 0
    assert ledger.outcomes[LOST] == 0, ledger.complaints
    log = server.log.read_text()
    assert "no sign of life" in log
    assert re.search(r'  File ".*hex_llm/engine/host\.py", line \d+ in run\n', log), "there are no stacks"
    record(
        "F2",
        f"--step_timeout_s=3: stacks in the log, /ping 503 {noticed:.1f} s and exit 71 {took:.1f} s after the stop, "
        "everybody told",
    )
    wait_for(lambda: is_gone(engine), 2, "the engine is left over")


def test_the_others_go_with_the_http_process(folder, tmp_path):
    slowest, rounds, port = 0.0, sized(1, 20), free_port()
    for _ in range(rounds):
        with running_server(folder, tmp_path / "log", port=port) as server:
            children = list(server.children())
            assert len(children) == 2
            server.process.kill()
            server.process.wait()
            took = wait_for(lambda children=children: all(map(is_gone, children)), 2, "a process is left over")
            slowest = max(slowest, took)
    record(
        "F4",
        f"{rounds} of {rounds}: the others gone after {slowest:.2f} s at most, the next start has the same port",
    )


def test_the_text_process_is_replaced(folder, tmp_path):
    with running_server(folder, tmp_path / "log") as server:
        (text,) = [pid for pid, line in server.children().items() if "hex_llm.text.process" in line]
        os.kill(text, signal.SIGKILL)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--max_model_len=100000"], 2, "beyond the model's context length"),
        (["--num_blocks=100000000"], 4, "blocks would fit"),
        (["--host=not-a-host.invalid"], 5, "cannot be looked up"),
        (["--api_key_file=nowhere"], 2, "cannot be read"),
        (["--ssl_keyfile=nowhere"], 2, "is not a file"),
        (["--ssl_certfile=README.md", "--ssl_keyfile=README.md"], 2, "are no certificate"),
    ],
)
def test_a_start_that_fails_says_why_in_its_last_line(folder, flags, code, words):
    command = [".venv/bin/hex-llm", "serve", str(folder), "--host=127.0.0.1", f"--port={free_port()}", *FLAGS, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def encrypt(tmp_path: Path) -> list[str]:
    """Flags of a server with a certificate of its own."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*new, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return [f"--ssl_certfile={certificate}", f"--ssl_keyfile={key}"]


@pytest.mark.parametrize("encrypted", [False, True], ids=["http", "https"])
def test_an_answer_that_is_read_slowly_is_finished_before_the_end(folder, tmp_path, encrypted):
    body = {"prompt": [5] * 200, "echo": True, "max_tokens": 1, "ignore_eos": True, "n": 80, "logprobs": 20}
    flags = ["--enable_prompt_logprobs", *(encrypt(tmp_path) if encrypted else ())]
    with running_server(folder, tmp_path / "log", *flags, ready=False) as server:
        server.url = server.url.replace("http:", "https:") if encrypted else server.url
        server.wait_until_ready()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        client.connect(("127.0.0.1", server.port))
        if encrypted:
            client = ssl._create_unverified_context().wrap_socket(client)
        content = json.dumps(body).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
        client.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        client.settimeout(60)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += client.recv(2**14)
        head, _, answer = answer.partition(b"\r\n\r\n")
        (length,) = [int(line[16:]) for line in head.decode().lower().split("\r\n") if "content-length" in line]
        assert length > 6e6, "the answer is so small that the kernel takes all of it"
        server.process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        while len(answer) < length:
            if len(answer) > length * (time.monotonic() - told) / 3:
                time.sleep(0.01)
            elif piece := client.recv(2**16):
                answer += piece
            else:
                break
        client.close()
        assert len(answer) == length
        assert server.process.wait(5) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_group_while_all_still_import_shows_no_traceback(folder, tmp_path, number):
    with running_server(folder, tmp_path / "log", ready=False) as server:
        wait_for(server.children, 10, "no process was started")
        os.killpg(server.process.pid, number)
        if number == signal.SIGHUP:
            server.wait_until_ready()
        else:
            assert server.process.wait(8) == 0
    assert "Traceback" not in server.log.read_text()


def fronts_of(server: RunningServer) -> list[int]:
    return [pid for pid, line in server.children().items() if "hex_llm.server.front" in line]


@pytest.mark.parametrize("to_group", [False, True])
def test_several_http_processes_share_the_port_the_engine_the_keys_and_the_end(folder, tmp_path, to_group):
    flags = ["--api_server_count=2", "--max_decode_seqs=8", "--drain_timeout_s=60"]
    with running_server(folder, tmp_path / "log", *flags, keys=["sk-one"]) as server:
        assert len(fronts_of(server)) == 2
        rng = random.Random(0)
        ledger = Load(server, [random_body(rng, 256, 250, 30) for _ in range(60)], concurrency=24).join()
        assert ledger.outcomes == {COMPLETED: 60}, ledger.complaints
        metrics = server.metrics()
        received = sum(value for name, value in metrics.items() if name.startswith("hexllm:requests_received_total"))
        assert received == 60
        # Each is a connection of its own, so that both processes are asked.
        for path in ["/v1/models", "/version", "/metrics", "/nowhere"] * 8:
            assert httpx.get(server.url + path).status_code == 401
        load = load_all(server, 100)
        children = list(server.children())
        if to_group:
            os.killpg(server.process.pid, signal.SIGINT)
        else:
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        ledger = load.join()
    assert ledger.outcomes == {COMPLETED: 100}, ledger.complaints
    assert server.log.read_text().count("shuts down") == 1
    wait_for(lambda: all(map(is_gone, children)), 2, "a process is left over")


def test_when_an_http_process_is_killed_the_others_finish_what_they_have(folder, tmp_path):
    with running_server(folder, tmp_path / "log", "--api_server_count=2", "--max_decode_seqs=8") as server:
        children = list(server.children())
        first, _ = fronts_of(server)
        os.kill(first, signal.SIGSTOP)  # so that the other one gets all requests
        load = load_all(server, 60)
        os.kill(first, signal.SIGKILL)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)  # the first that the user sends, whatever was sent before
        assert server.process.wait(60) == 128 + signal.SIGKILL
        ledger = load.join()
    assert ledger.outcomes == {COMPLETED: 60}, ledger.complaints
    wait_for(lambda: all(map(is_gone, children)), 2, "a process is left over")


def test_several_http_processes_that_cannot_start_say_why_once(folder, tmp_path):
    template = tmp_path / "template"
    template.write_text("{% if %}")
    flags = ["--api_server_count=3", f"--chat_template={template}"]
    with running_server(folder, tmp_path / "log", *flags, ready=False) as server:
        assert server.process.wait(60) == 2
        lines = server.log.read_text().splitlines()
    assert lines[-1].startswith("hex-llm: --chat_template=")
    assert sum("hex-llm: " in line for line in lines) == 1
