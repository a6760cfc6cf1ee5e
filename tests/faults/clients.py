"""Clients that time what they are told, and clients that leave."""

import asyncio
import re
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from hex_llm.bench.http_client import HttpClient
from tests.faults.pinging import share
from tests.server.load import COMPLETED, Ledger
from tests.server.servers import RunningServer

_TOKEN_IDS = re.compile(rb'"token_ids":\[([^\]]*)\]')


@dataclass(slots=True)
class Times:
    """Of streams: until their first piece, between pieces, and between tokens, which is a mean for each stream."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)


async def stream(client: HttpClient, body: dict[str, Any], times: Times, ledger: Ledger) -> None:
    """One streamed request to /v1/completions, read to its end. What is not answered with 200 is noted by its code."""
    started = time.perf_counter()
    request = orjson.dumps(body | {"stream": True, "ignore_eos": True})
    async with client.request("POST", "/v1/completions", request) as response:
        if response.status != 200:
            ledger.note(orjson.loads(await response.read_all())["error"]["code"] or "invalid")
            return
        first = last = None
        end = b""
        while piece := await response.read():
            now = time.perf_counter()
            if last is not None:
                times.gaps_s.append(now - last)
            first, last, end = first or now, now, piece
        assert first is not None
        assert last is not None
        assert end.endswith(b"data: [DONE]\n\n"), f"a stream ended with {end[-100:]!r}"
    times.first_s.append(first - started)
    if body["max_tokens"] > 1:
        times.per_token_s.append((last - first) / (body["max_tokens"] - 1))
    ledger.note(COMPLETED)


async def stream_for(server: RunningServer, seconds: float, count: int) -> tuple[Times, Ledger]:
    """So many streams at a time, one after the other; the last of them begin within these seconds."""
    times, ledger = Times(), Ledger()
    client = HttpClient(server.url, server.headers)
    end = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < end:
            await stream(client, {"prompt": [5, 6, 7], "max_tokens": 150}, times, ledger)

    await asyncio.gather(*(one() for _ in range(count)))
    client.close()
    return times, ledger


async def time_to_first_token(server: RunningServer, count: int = 50) -> float:
    """The median of so many requests, one after the other."""
    client, times, ledger = HttpClient(server.url, server.headers), Times(), Ledger()
    for _ in range(count):
        await stream(client, {"prompt": [5, 6, 7], "max_tokens": 4}, times, ledger)
    client.close()
    assert ledger.outcomes[COMPLETED] == count
    return share(times.first_s, 0.5)


async def until(condition: Callable[[], Any], seconds: float, what: str) -> float:
    """Asks in a thread until it is true; returns how long it took."""
    started = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() - started < seconds, what
        await asyncio.sleep(0.02)
    return time.monotonic() - started


async def leave(
    port: int, body: dict[str, Any], *, when: Callable[[asyncio.StreamReader], Awaitable[object]], reset: bool
) -> None:
    """Asks, and is gone when `when` returns: with a reset, or politely."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = orjson.dumps(body)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(content), content)
    )
    await when(reader)
    if reset:
        option = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
    writer.transport.abort()


async def read_tokens(reader: asyncio.StreamReader, count: int) -> None:
    """Until so many tokens have come of a stream that tells them."""
    data = b""
    while sum(len(ids.split(b",")) for ids in _TOKEN_IDS.findall(data) if ids) < count:
        part = await reader.read(2**16)
        assert part, f"the server ended the connection after {data[-300:]!r}"
        data += part
