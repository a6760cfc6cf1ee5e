"""Sends mutated requests to a server over connections that are kept, and sees what it makes of them."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.faults.mutations import Mutant
from tests.server.refusals import error_of

HANG_S = 10.0

NUM_CONNECTIONS = 32

type Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Findings:
    """What became of the requests: how many had each status, and those that should not have ended as they did."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    hangs: int = 0
    slowest_s: float = 0.0

    @property
    def server_errors(self) -> int:
        return sum(count for status, count in self.statuses.items() if status.startswith("5"))

    @property
    def num_sent(self) -> int:
        return self.statuses.total()

    def add(self, mutant: Mutant, status: str, seconds: float, fault: str | None) -> None:
        self.statuses[status] += 1
        self.slowest_s = max(self.slowest_s, seconds)
        if fault is not None:
            self.faults.append(f"{mutant.number} {mutant.route}: {status}, {fault}; sent {mutant.body[:200]!r}")


async def fuzz(port: int, mutants: Iterator[Mutant], connections: int = NUM_CONNECTIONS) -> Findings:
    findings = Findings()
    await asyncio.gather(*(_work(port, mutants, findings) for _ in range(connections)))
    return findings


async def _work(port: int, mutants: Iterator[Mutant], findings: Findings) -> None:
    connection: Connection | None = None
    for mutant in mutants:
        fresh = connection is None or not mutant.whole
        if fresh:
            await _close(connection)
            connection = await asyncio.open_connection("127.0.0.1", port)
        assert connection is not None
        started = time.monotonic()
        try:
            async with asyncio.timeout(HANG_S):
                status, headers, body = await _ask(connection, mutant)
        except TimeoutError:
            findings.hangs += 1
            findings.add(mutant, "none", HANG_S, f"no answer in {HANG_S:g} s")
            keep = False
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            fault = f"the connection ended ({type(error).__name__})"
            findings.add(mutant, "none", time.monotonic() - started, fault)
            keep = False
        else:
            seconds = time.monotonic() - started
            findings.add(mutant, str(status), seconds, _fault(mutant, status, headers, body))
            keep = mutant.whole and headers.get("connection") != "close"
        if not keep:
            await _close(connection)
            connection = None
    await _close(connection)


async def _close(connection: Connection | None) -> None:
    if connection is not None:
        connection[1].close()


async def _ask(connection: Connection, mutant: Mutant) -> tuple[int, dict[str, str], bytes]:
    reader, writer = connection
    writer.write(mutant.head + mutant.body)
    status, headers = 100, {}
    while status < 200:  # what comes before says only that the server goes on reading
        line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(line.split()[1])
        headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
    if "content-length" in headers:
        return status, headers, await reader.readexactly(int(headers["content-length"]))
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return status, headers, b"".join(parts)


def _fault(mutant: Mutant, status: int, headers: dict[str, str], body: bytes) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if status == 200:
        # A stream tells in its last event that it could not go on.
        if b'{"error":' in body[:10] or b'data: {"error"' in body or b'\0{"error"' in body:
            return f"an error in the answer: {body[-300:]!r}"
        if headers["content-type"] == "text/event-stream" and not body.endswith(b"data: [DONE]\n\n"):
            return f"a stream without an end: {body[-100:]!r}"
        return None
    if mutant.good:
        return f"refused, though it is good: {body[:300]!r}"
    if not 400 <= status < 500 or status == 429:
        return f"{body[:300]!r}"
    try:
        error_of(body)
    except (AssertionError, ValueError, KeyError) as error:
        return f"an odd refusal ({type(error).__name__}): {body[:300]!r}"
    return None
