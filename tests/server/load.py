"""Many requests at once, and what has become of each: nothing may go without an answer."""

import asyncio
import collections
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from hex_llm.bench.http_client import HttpClient, HttpError, Response

COMPLETED, ABORTED, LOST, UNREACHABLE = "completed", "aborted", "lost", "unreachable"
PREFIX = 64  # tokens that a third of the prompts have in common


@dataclass
class Ledger:
    """How requests ended: completed, aborted by us, lost, never begun because nobody listened, or with the code of an
    error.
    """

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)  # until the first piece of each stream that was completed
    last_answer: float = 0.0  # when, by time.monotonic()
    complaints: list[str] = field(default_factory=list)

    def note(self, outcome: str, complaint: str = "") -> None:
        self.outcomes[outcome] += 1
        self.last_answer = time.monotonic()
        if complaint and len(self.complaints) < 20:
            self.complaints.append(complaint)

    @property
    def total(self) -> int:
        return self.outcomes.total()

    def __add__(self, other: "Ledger") -> "Ledger":
        return Ledger(
            outcomes=self.outcomes + other.outcomes,
            tokens=self.tokens + other.tokens,
            first_s=self.first_s + other.first_s,
            last_answer=max(self.last_answer, other.last_answer),
            complaints=self.complaints + other.complaints,
        )


async def ask(client: HttpClient, ledger: Ledger, body: dict[str, Any], *, abort_after_s: float | None = None) -> None:
    """One request to /v1/completions with `ignore_eos`. Whatever the answer, it is noted."""
    started = time.perf_counter()
    try:
        async with (
            asyncio.timeout(abort_after_s),
            client.request("POST", "/v1/completions", orjson.dumps(body)) as response,
        ):
            await _read(response, ledger, body, started)
    except TimeoutError:
        ledger.note(ABORTED)
    except (HttpError, AssertionError, ValueError, KeyError) as error:
        outcome = UNREACHABLE if "cannot be reached" in str(error) else LOST
        ledger.note(outcome, f"{type(error).__name__}: {error}; asked for {body['max_tokens']} tokens")


async def _read(response: Response, ledger: Ledger, body: dict[str, Any], started: float) -> None:
    piece = await response.read()
    first_s = time.perf_counter() - started
    content = piece + await response.read_all()
    if response.status != 200:
        ledger.note(orjson.loads(content)["error"]["code"] or "invalid")
        return
    wanted = body["max_tokens"] * body.get("n", 1)
    if not body.get("stream"):
        usage = orjson.loads(content)["usage"]
    else:
        events = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: ")]
        if events and events[-1] != b"[DONE]" and b'"error"' in events[-1]:
            ledger.note(orjson.loads(events[-1])["error"]["code"])
            return
        assert events, "an answer without events"
        assert events[-1] == b"[DONE]", "a stream was cut without a word"
        usage = orjson.loads(events[-2])["usage"]
    assert usage["completion_tokens"] == wanted, f"{usage['completion_tokens']} tokens"
    if body.get("stream"):
        ledger.first_s.append(first_s)
    ledger.tokens += wanted
    ledger.note(COMPLETED)


def random_body(rng: random.Random, context: int, vocabulary: int, max_tokens: int) -> dict[str, Any]:
    """Prompt lengths are log-uniform, half of the requests stream, a few want several answers."""
    longest = min(max_tokens, context // 4)
    output = rng.randint(1, longest)
    length = min(int(context ** rng.uniform(0, 0.95)), context - longest)
    return {
        "prompt": [rng.randrange(3, vocabulary) for _ in range(max(length, 1))],
        "max_tokens": output,
        "ignore_eos": True,
        "stream": rng.random() < 0.5,
        "n": rng.randint(2, 4) if rng.random() < 0.05 else 1,
        "temperature": rng.choice((0, 1)),
    }


def random_bodies(seed: int, context: int, vocabulary: int, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Without end: as `random_body` has them, and a third with the same beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocabulary) for _ in range(PREFIX)]
    while True:
        body = random_body(rng, context - PREFIX, vocabulary, max_tokens)
        yield body | {"prompt": (shared if rng.random() < 0.3 else []) + body["prompt"]}


async def run_load(
    url: str,
    bodies: Iterable[dict[str, Any]],
    *,
    concurrency: int,
    abort_share: float = 0.0,
    seed: int = 0,
    headers: Mapping[str, str] | None = None,
    ledger: Ledger | None = None,
) -> Ledger:
    """Sends all bodies, so many at a time; a share of them is given up by the client on the way. The ledger is the
    one that it was given, or its own.
    """
    ledger, rng = ledger or Ledger(), random.Random(seed)
    client = HttpClient(url, headers or {})
    left = iter(bodies)

    async def one_after_the_other() -> None:
        for body in left:
            abort_after_s = rng.expovariate(5) if rng.random() < abort_share else None
            await ask(client, ledger, body, abort_after_s=abort_after_s)

    await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
    client.close()
    return ledger
