"""Sends requests when they are due and notes when their answers came."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hex_llm.bench.backends import AnswerError, AnswerReader, Backend, error_of
from hex_llm.bench.http_client import HttpClient, HttpError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Times are seconds; `start_s` is on the clock of all outcomes of a run."""

    start_s: float
    latency_s: float = 0.0
    first_token_s: float | None = None  # from the start; None where the answer came in one piece
    gaps_s: tuple[float, ...] = ()  # between chunks
    input_tokens: int | None = None  # as the server counts
    output_tokens: int | None = None  # as the server counts
    text: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it is asked."""

    client: HttpClient
    backend: Backend
    endpoint: str
    timeout_s: float


def arrival_times(count: int, rate: float, burstiness: float, random: np.random.Generator) -> list[float]:
    """When each request is due: gaps of a gamma distribution, scaled so that `count` requests take count / rate.

    A burstiness of 1 makes a Poisson process, less makes bursts, more evens the gaps out.
    """
    if rate == float("inf"):
        return [0.0] * count
    even = burstiness == float("inf")
    due = np.cumsum(np.ones(count) if even else random.gamma(burstiness, size=count))
    if not due[-1] > 0:  # burstiness so small that all gaps round to nothing
        return [count / rate] * count
    return (due * (count / rate / due[-1])).tolist()


async def send_all(
    target: Target,
    bodies: Sequence[bytes],
    due: Sequence[float],
    *,
    max_concurrency: int | None,
    on_done: Callable[[], None],
) -> tuple[list[Outcome], float]:
    """The outcomes, in the order of the bodies, and the seconds from the start to the end of the last one."""
    slots = asyncio.Semaphore(max_concurrency or len(bodies))

    async def one(body: bytes) -> Outcome:
        async with slots:
            outcome = await send(target, body)
        on_done()
        return outcome

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for body, at in zip(bodies, due, strict=True):
            wait = started + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(body)))
    return [task.result() for task in tasks], time.perf_counter() - started


async def send(target: Target, body: bytes) -> Outcome:
    """Sends one request and reads its answer; a failure is an outcome too."""
    start = time.perf_counter()
    reader = target.backend.reader()
    try:
        async with asyncio.timeout(target.timeout_s):
            times, end = await _read(target, body, reader)
    except TimeoutError:
        return Outcome(start, error=f"The request took more than {target.timeout_s:g} s.")
    except (HttpError, AnswerError) as error:
        return Outcome(start, error=str(error))
    return Outcome(
        start_s=start,
        latency_s=end - start,
        first_token_s=times[0] - start if target.backend.streams else None,
        gaps_s=tuple(after - before for before, after in pairwise(times)) if target.backend.streams else (),
        input_tokens=reader.input_tokens,
        output_tokens=reader.output_tokens,
        text="".join(reader.texts),
    )


async def _read(target: Target, body: bytes, reader: AnswerReader) -> tuple[list[float], float]:
    """When each chunk with tokens came, of which there is at least one, and when the last of any kind did."""
    times: list[float] = []
    end: float | None = None
    async with target.client.request("POST", target.endpoint, body) as response:
        if response.status != 200:
            raise AnswerError(error_of(response.status, await response.read_all()))
        while data := await response.read():
            now = time.perf_counter()
            chunks, anything = reader.feed(data)
            times += [now] * chunks
            if anything:
                end = now
        reader.close()
    if end is None:
        raise AnswerError("The stream ended without a token.")
    return times or [end], end
