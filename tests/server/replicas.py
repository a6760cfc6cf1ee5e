"""The engines behind a real server: their processes, what it tells of them, and requests that are under way on all of
them together."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.server.servers import RunningServer


def tasks(server: RunningServer) -> dict[int, dict]:
    """What the engines' processes were told, by their numbers."""
    return {
        pid: json.loads(line[line.index("{") :])
        for pid, line in server.children().items()
        if "hex_llm.engine_process" in line
    }


def engines(server: RunningServer) -> dict[int, int]:
    """The engines' processes, by replica."""
    return {engine["replica"]: pid for pid, task in tasks(server).items() for engine in task["engines"]}


def ask(server: RunningServer, body: dict) -> tuple[str, str]:
    """The text and the reason that it ended for."""
    answer = server.post("/v1/completions", body, timeout=60)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        choice = answer.json()["choices"][0]
        return choice["text"], choice["finish_reason"]
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", answer.text
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


class Load:
    """Requests that are all under way at the same time."""

    def __init__(self, server: RunningServer, asked: list[dict]):
        self._pool = ThreadPoolExecutor(len(asked))
        self._answers = [self._pool.submit(ask, server, body) for body in asked]

    def answers(self) -> list[tuple[str, str]]:
        return [answer.result(60) for answer in self._answers]

    def errors(self) -> list[BaseException | None]:
        return [answer.exception(10) for answer in self._answers]


class Pings:
    """What /ping says all the while."""

    def __init__(self, server: RunningServer):
        self._server = server
        self._stop = threading.Event()
        self.codes: set[int] = set()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Pings":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        with httpx.Client() as client:
            while not self._stop.wait(0.05):
                self.codes.add(client.get(self._server.url + "/ping").status_code)


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> float:
    """How long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, what
        time.sleep(0.02)
    return time.monotonic() - started


def sample(server: RunningServer, name: str) -> float:
    """A metric by its name, with what labels it has; those that all differ in nothing but these are added up."""
    metrics, name = server.metrics(), f"hexllm:{name}"
    found = [value for each, value in metrics.items() if each == name or each.startswith(f"{name}{{")]
    assert found, f"there is no {name}"
    return sum(found)


def up(server: RunningServer, replicas: Iterable[int]) -> bool:
    return all(sample(server, f'replica_up{{replica="{replica}"}}') for replica in replicas)


def wait_until_up(server: RunningServer, replicas: Iterable[int] = (0, 1), seconds: float = 60) -> float:
    replicas = tuple(replicas)
    return wait_for(
        lambda: up(server, replicas), seconds, f"a replica did not come back: {server.log.read_text()[-2000:]}"
    )


def generated(server: RunningServer) -> float:
    metrics = server.metrics()
    return sum(value for name, value in metrics.items() if name.startswith("hexllm:generation_tokens_total"))


def wait_until_asked(server: RunningServer, number: int, seconds: float = 4) -> None:
    wait_for(lambda: sample(server, "requests_in_flight") == number, seconds, "requests did not arrive")


def stop(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def go_on(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def run_until(pids: Iterable[int], condition: Callable[[], object], what: str, seconds: float = 4) -> None:
    """Has processes that are stopped go on, a few moments at a time, until it is so; then they are stopped again."""
    pids = tuple(pids)

    def moved() -> object:
        go_on(pids)
        time.sleep(0.02)
        stop(pids)
        return condition()

    wait_for(moved, seconds, what)
