"""Bytes on a socket that are nearly HTTP. A number tells which: the same one is always the same bytes."""

import asyncio
import itertools
import json
import random
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.faults.valid_bodies import BODIES

HANG_S = 10.0  # for an answer, or the end of the connection; the server is told to give up earlier
QUIET_S = 0.2  # after an answer: long enough for one more
NUM_CONNECTIONS = 32

_STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) ")
_TRANSFER = b"Transfer-Encoding: chunked"
_BAD_CHUNKS = (
    b"zz\r\nabc\r\n", b"-1\r\n", b"f" * 30 + b"\r\n", b"1\r\nabc\r\n", b"5\r\nabc", b"0x3\r\nabc\r\n0\r\n\r\n", b"\r\n",
    b"3;a=b\r\nabc\r\n0\r\nTrailer: x\r\n\r\n", b"3 \r\nabc\r\n0\r\n\r\n", b"3\nabc\n0\n\n", b"+3\r\nabc\r\n0\r\n\r\n",
    b"0" * 200 + b"3\r\nabc\r\n0\r\n\r\n", b"3;" + b"x" * 70_000 + b"\r\nabc\r\n", b"0\r\n", b"0\r\n\r\nGET /ping",
    b"1\r\nx\r\n" * 2000, b"3\r\nabc\r\n\0\r\n\r\n",
)  # fmt: skip
_LENGTHS = (
    b"Content-Length: 0", b"Content-Length: -1", b"Content-Length: +5", b"Content-Length: 5, 5", b"Content-Length: 1e3",
    b"Content-Length: 0x5", b"Content-Length: 99999999999999999999", b"Content-Length:", b"Content-Length: 5\r\n 6",
    b"Content-Length : 5", b"Content-Length: 16777217", b"Content-Length: 4\r\nContent-Length: 5",
    b"Transfer-Encoding: identity", b"Transfer-Encoding: xchunked", b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding:\x0bchunked", b"transfer-encoding: CHUNKED", _TRANSFER + b"\r\n" + _TRANSFER,
)  # fmt: skip
_LINES = (
    b"GET /ping", b"GET /ping HTTP/0.9", b"GET /ping HTTP/9.9", b"GET /ping HTTP/2.0", b"GET /ping HTTP/1.2",
    b"GET /ping HTTP/1.0", b"GET  /ping HTTP/1.1", b"GET\t/ping\tHTTP/1.1", b"/ping HTTP/1.1", b"GET HTTP/1.1", b"GET",
    b"G\0T /ping HTTP/1.1", b"GET /pi\0ng HTTP/1.1", b"GET /ping HTTP/1.1\0", b"get /ping http/1.1", b"GET * HTTP/1.1",
    b"OPTIONS * HTTP/1.1", b"CONNECT a:443 HTTP/1.1", b"TRACE / HTTP/1.1", b"PRI * HTTP/2.0", b"HEAD /ping HTTP/1.1",
    b"GET http://other.example/ping HTTP/1.1", b"GET //ping HTTP/1.1", b"GET /%00%ff%zz HTTP/1.1", b"GET ? HTTP/1.1",
    b"GET /ping?" + b"a" * 3000 + b" HTTP/1.1", b"GET /../../etc/passwd HTTP/1.1", b"GET /\xc3\xa9\xff HTTP/1.1",
    b"X" * 5000 + b" / HTTP/1.1", b"GET /v1/models/%2e%2e%2f HTTP/1.1", b"GET /" + b"a" * 70_000 + b" HTTP/1.1",
)  # fmt: skip
_HEADERS = (
    b"Host: a", b"Host: a\r\nHost: b", b"Host: a b", b"Host:", b": x", b"A", b"A\0: b", b"A: \0", b" A: b", b"A : b",
    b"A: b\r\n folded", b"A: \x7f\xff", b"Expect: 100-continue", b"Expect: x", b"Connection: close, keep-alive",
    b"Upgrade: h2c\r\nConnection: Upgrade", b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: eA==",
    b"Content-Type: application/json", b"Authorization: Bearer \xff", b"Cookie: " + b"a=b; " * 500, b"A: b\rC: d",
    b"A: b\nC: d", b"Range: bytes=0-0,0-0", b"TE: trailers", b"If-None-Match: *", b"X-Request-Id: \x1b[31m",
)  # fmt: skip
_STRANGERS = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + b"\xaa" * 99,
    b"SSH-2.0-OpenSSH_9.0\r\n", b"EHLO a\r\n", b"\0" * 1000, b"\r\n" * 3000, b"\n" * 70_000, b"*1\r\n$4\r\nPING\r\n",
    b"{}\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b" GET /ping HTTP/1.1\r\n\r\n", b"\xff\xfeG\0E\0T\0", b"",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Talk:
    """What is sent, piece by piece, and what the client does then: wait, close, reset, or close its own half."""

    number: int
    pieces: tuple[bytes, ...]
    pause_s: float
    end: str


def talk(number: int, seed: int = 0) -> Talk:
    rng = random.Random(f"raw {seed} {number}")
    data = rng.choice(_KINDS)(rng)
    pause_s = 0.0
    if len(data) > 1 and rng.random() < 0.3:
        places = sorted(rng.sample(range(1, len(data)), min(rng.choice((1, 2, 5, 20)), len(data) - 1)))
        pieces = tuple(data[start:end] for start, end in itertools.pairwise((0, *places, len(data))))
        pause_s = rng.choice((0.0, 0.002, 0.02))
    else:
        pieces = (data,)
    end = rng.choices(("wait", "close", "reset", "half"), (6, 1, 1, 2))[0]
    if end in ("close", "reset") and rng.random() < 0.7:  # before all was sent
        pieces = (data[: rng.randint(0, len(data))],)
    return Talk(number, pieces, pause_s, end)


def talks(count: int, seed: int = 0) -> Iterator[Talk]:
    return (talk(number, seed) for number in range(count))


def _valid(rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        path = rng.choice(("/ping", "/live", "/version", "/v1/models", "/metrics", "/", "/nowhere", "/generate"))
        return b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode()
    route, body = rng.choice(BODIES)
    text = json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" % route.encode()
    if rng.random() < 0.3:
        half = len(text) // 2
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (text[:half], text[half:]))
        return head + _TRANSFER + b"\r\n\r\n" + chunks + b"0\r\n\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(text) + text


def _mutated(rng: random.Random) -> bytes:
    """A valid request with some bytes changed, removed, doubled or strewn in."""
    data = bytearray(_valid(rng))
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        place, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 10))
        match rng.randrange(5):
            case 0 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                del data[place : place + size]
            case 2:
                data[place:place] = rng.choice((b"\0", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b":", b" ", b"\xff", b"\t"))
            case 3:
                data[place:place] = data[place : place + size]
            case _:
                data[place : place + size] = rng.randbytes(size)
    return bytes(data)


def _bad_chunks(rng: random.Random) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + _TRANSFER + b"\r\n\r\n" + rng.choice(_BAD_CHUNKS)


def _framing(rng: random.Random) -> bytes:
    """Lengths and encodings, often two that contradict each other."""
    lines = rng.sample((*_LENGTHS, _TRANSFER, b"Content-Length: 5"), rng.choice((1, 2, 2, 3)))
    body = rng.choice((b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"", b"0\r\n\r\nGET /ping HTTP/1.1\r\nHost: a\r\n\r\n"))
    return b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + b"\r\n".join(lines) + b"\r\n\r\n" + body


def _odd_head(rng: random.Random) -> bytes:
    line = rng.choice((*_LINES, b"GET /ping HTTP/1.1"))
    headers = rng.sample(_HEADERS, rng.choice((0, 1, 2, 3)))
    return rng.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r")).join((line, b"Host: a", *headers, b"", b""))


def _many_headers(rng: random.Random) -> bytes:
    header = rng.choice((b"A:\r\n", b"A: b\r\n", b"Host: a\r\n", b"A: " + b"x" * 500 + b"\r\n", b"Cookie: a\r\n"))
    return b"GET /ping HTTP/1.1\r\n" + header * rng.choice((254, 256, 257, 1000, 5000)) + b"\r\n"


def _pipelined(rng: random.Random) -> bytes:
    requests = [_valid(rng) for _ in range(rng.choice((2, 3, 5, 20)))]
    return b"".join(requests) + rng.choice((b"", b"", b"GET /pi", b"\0", b"bad\r\n\r\n"))


def _stranger(rng: random.Random) -> bytes:
    return rng.choice(_STRANGERS) if rng.random() < 0.7 else rng.randbytes(rng.choice((1, 20, 500, 70_000)))


_KINDS = (_mutated, _mutated, _mutated, _mutated, _valid, _bad_chunks, _framing, _odd_head, _many_headers, _pipelined,
          _stranger)  # fmt: skip


@dataclass(slots=True)
class Findings:
    """How many answers had each status, how many talks had none, and what should not have been."""

    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: int = 0
    num_talks: int = 0
    slowest_s: float = 0.0
    faults: list[str] = field(default_factory=list)


async def fuzz(port: int, todo: Iterator[Talk], connections: int = NUM_CONNECTIONS) -> Findings:
    findings = Findings()

    async def work() -> None:
        for each in todo:
            await _hold(port, each, findings)

    await asyncio.gather(*(work() for _ in range(connections)))
    return findings


async def _hold(port: int, talk: Talk, findings: Findings) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started, answer = time.monotonic(), bytearray()
    try:
        await _say(writer, talk)
        if talk.end in ("wait", "half"):
            await _listen(reader, answer)
    except TimeoutError:
        findings.faults.append(f"{talk.number}: no answer and no end in {HANG_S:g} s, after {talk.pieces!r:.300}")
    except OSError:
        pass  # the server has had enough, as it may
    finally:
        writer.transport.abort()
    findings.num_talks += 1
    findings.slowest_s = max(findings.slowest_s, time.monotonic() - started)
    statuses = [int(status) for status in _STATUS.findall(answer)]
    findings.statuses.update(statuses)
    findings.unanswered += not statuses
    if (answer and not answer.startswith(b"HTTP/1.1 ")) or any(status >= 500 for status in statuses):
        findings.faults.append(f"{talk.number}: {answer[:300]!r} after {talk.pieces!r:.300}")


async def _say(writer: asyncio.StreamWriter, talk: Talk) -> None:
    for piece in talk.pieces:
        writer.write(piece)
        await writer.drain()
        if talk.pause_s:
            await asyncio.sleep(talk.pause_s)
    if talk.end == "reset":
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    elif talk.end == "half":
        writer.write_eof()


async def _listen(reader: asyncio.StreamReader, answer: bytearray) -> None:
    """Until the server ends the connection, or has answered and says no more."""
    while True:
        try:
            async with asyncio.timeout(QUIET_S if answer else HANG_S):
                part = await reader.read(2**16)
        except TimeoutError:
            if answer:
                return
            raise
        if not part:
            return
        answer += part
