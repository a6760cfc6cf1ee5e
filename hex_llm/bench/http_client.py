"""A small HTTP/1.1 client for many answers at once, read as they come.

Its machine is often the server's, so it spends little: one wake-up and no copy to speak of for each piece that the
network delivers. Whatever goes wrong between the two ends is an HttpError.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

READ_BYTES = 1 << 16
MAX_HEAD_BYTES = 1 << 16
MAX_IDLE_S = 2.0  # servers close idle connections after 5 s and more


class HttpError(Exception):
    """The exchange failed; the message says how."""


class Body(Protocol):
    """What is left of an answer's body on the wire."""

    done: bool

    def feed(self, data: bytes) -> bytes:
        """The part of the body in these bytes from the network."""
        ...

    def close(self) -> None:
        """Called when the server has closed the connection; raises HttpError if that is too early."""
        ...


class ChunkedBody:
    """Pieces, each with its size in front; a piece of no bytes is the end."""

    def __init__(self) -> None:
        self.done = False
        self._buffer = b""
        self._left = 0  # bytes of the present piece that have not come yet
        self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        data = self._buffer + data if self._buffer else data
        pieces: list[bytes] = []
        position = 0
        while not self.done:
            if self._left:
                piece = data[position : position + self._left]
                pieces.append(piece)
                self._left -= len(piece)
                position += len(piece)
                if self._left:
                    break
            end = data.find(b"\n", position)
            if end < 0:
                break
            self._line(data[position:end].strip())
            position = end + 1
        self._buffer = data[position:]
        if len(self._buffer) > MAX_HEAD_BYTES:
            raise HttpError("The server sent a chunk without its size.")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _line(self, line: bytes) -> None:
        if self._in_trailer:
            self.done = not line
        elif line:  # empty after every piece
            size = line.partition(b";")[0].strip()
            try:
                self._left = int(size, 16)
            except ValueError:
                raise HttpError(f"The server sent {size[:20]!r} as the size of a chunk.") from None
            if self._left < 0:
                raise HttpError(f"The server sent {size[:20]!r} as the size of a chunk.")
            self._in_trailer = self._left == 0

    def close(self) -> None:
        raise HttpError("The server closed the connection in the middle of its answer.")


class SizedBody:
    """As many bytes as Content-Length says."""

    def __init__(self, size: int) -> None:
        self._left = size
        self.done = size == 0

    def feed(self, data: bytes) -> bytes:
        if len(data) > self._left:
            raise HttpError("The server sent more than its Content-Length.")
        self._left -= len(data)
        self.done = self._left == 0
        return data

    def close(self) -> None:
        raise HttpError(f"The server closed the connection {self._left} bytes before the end of its answer.")


class UnsizedBody:
    """All there is until the server closes the connection."""

    done = False

    def feed(self, data: bytes) -> bytes:
        return data

    def close(self) -> None:
        self.done = True


@dataclass(frozen=True, slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Response:
    """An answer whose head has come, and whose body is read piece by piece."""

    def __init__(self, status: int, headers: Mapping[str, str], body: Body, reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._body = body
        self._reader = reader

    async def read(self) -> bytes:
        """The next piece of the body, which may have been sent in several; empty at the end."""
        while not self._body.done:
            data = await self._reader.read(READ_BYTES)
            if not data:
                self._body.close()
                break
            if piece := self._body.feed(data):
                return piece
        return b""

    async def read_all(self) -> bytes:
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    @property
    def can_be_followed(self) -> bool:
        """Whether the connection may be used again."""
        whole = self._body.done and not isinstance(self._body, UnsizedBody)
        return whole and "close" not in self.headers.get("connection", "").lower()


class HttpClient:
    """Connections to one server, each used again when its answer has been read to the end."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(base_url)
        self._host = parts.hostname or ""
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._prefix = parts.path.rstrip("/")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in {"Host": parts.netloc, **headers}.items())
        self._idle: list[tuple[float, _Connection]] = []  # each with the time since when it is

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Response]:
        """Sends a request; the answer is there once its head has come."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        connection = None
        try:
            connection, response = await self._exchange(f"{head}\r\n".encode() + body)
            yield response
            if response.can_be_followed:
                self._idle.append((time.monotonic(), connection))
                connection = None
        except (OSError, EOFError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise HttpError(f"The connection broke: {reason or type(error).__name__}.") from None
        finally:
            if connection is not None:
                connection.writer.close()

    async def _exchange(self, message: bytes) -> tuple[_Connection, Response]:
        connection = self._take_idle() or await self._connect()
        try:
            return connection, await _send(connection, message)
        except BaseException:
            connection.writer.close()
            raise

    def _take_idle(self) -> _Connection | None:
        """A connection that the server has not closed, and is not about to: to send a request twice is no option."""
        while self._idle:
            since, connection = self._idle.pop()
            if time.monotonic() - since < MAX_IDLE_S and not connection.reader.at_eof():
                return connection
            connection.writer.close()
        return None

    async def _connect(self) -> _Connection:
        try:
            return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=self._ssl))
        except OSError as error:  # also ssl's
            reason = error.strerror or type(error).__name__
            raise HttpError(f"{self._host}:{self._port} cannot be reached: {reason}.") from None

    def close(self) -> None:
        for _, connection in self._idle:
            connection.writer.close()
        self._idle.clear()


async def _send(connection: _Connection, message: bytes) -> Response:
    connection.writer.write(message)
    await connection.writer.drain()
    while True:
        status, headers = await _read_head(connection.reader)
        if status >= 200:  # below it, word that the answer is on its way
            return Response(status, headers, _body(status, headers), connection.reader)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise HttpError("The server closed the connection without an answer.") from None
        raise HttpError("The server closed the connection in the middle of its answer.") from None
    except asyncio.LimitOverrunError:
        raise HttpError(f"The head of the server's answer is longer than {MAX_HEAD_BYTES} bytes.") from None
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise HttpError(f"The server does not speak HTTP/1.1: its answer starts with {first[:40]!r}.")
    headers = {"connection": "close"} if version == "HTTP/1.0" else {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return int(rest[:3]), headers


def _body(status: int, headers: Mapping[str, str]) -> Body:
    if status in (204, 304):
        return SizedBody(0)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return ChunkedBody()
    if "content-length" not in headers:
        return UnsizedBody()
    size = headers["content-length"]
    if not size.isdecimal():
        raise HttpError(f"The server sent {size[:20]!r} as the Content-Length.")
    return SizedBody(int(size))
