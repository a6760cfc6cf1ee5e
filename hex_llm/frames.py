"""Messages between processes of one machine: length, then msgpack, over a socket pair that only they hold.

A schema says what may come; what does not fit it ends the connection, and nothing that comes is ever run.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

logger = logging.getLogger(__name__)

MAX_FRAME = 64 * 2**20
_LENGTH = 4  # bytes, the highest first


class Broken(Exception):
    """What came is no message of ours."""


def encode(message: msgspec.Struct) -> bytes:
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME:
        raise Broken(f"A message of {len(body)} bytes is more than {MAX_FRAME}.")
    return len(body).to_bytes(_LENGTH) + body


class Decoder[Message]:
    """Bytes as they come to the messages that they hold. `schema` is a union of tagged structs."""

    def __init__(self, schema: Any):
        self._decoder = msgspec.msgpack.Decoder(schema)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH:
                end = start + _LENGTH + int.from_bytes(buffer[start : start + _LENGTH])
                if end - start - _LENGTH > MAX_FRAME:
                    raise Broken(f"A message of {end - start - _LENGTH} bytes is more than {MAX_FRAME}.")
                if len(buffer) < end:
                    break
                try:
                    message = self._decoder.decode(memoryview(buffer)[start + _LENGTH : end].tobytes())
                except (ValueError, TypeError, RecursionError) as error:  # msgspec's own is a ValueError
                    raise Broken(f"A message does not fit its schema: {error}") from None
                start = end
                yield message
        finally:
            del buffer[:start]


def read_frames[Message](connection: socket.socket, decoder: Decoder[Message]) -> Iterator[Message]:
    """The messages of a blocking socket until its other end goes away."""
    while data := _receive(connection):
        yield from decoder.feed(data)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(2**18)
    except ConnectionResetError:
        return b""


class FrameProtocol[Message](asyncio.Protocol):
    """An event loop's end of a connection: calls `take` for every message, and `lost` once when it has ended."""

    def __init__(self, schema: Any, take: Callable[[Message], None], lost: Callable[[], None]):
        self._decoder: Decoder[Message] = Decoder(schema)
        self._take = take
        self._lost = lost
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one without being its subclass

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                self._take(message)
        except Broken as error:
            logger.error("The connection to another process is ended: %s", error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message, or drops it where nobody is there any more: then `lost` says so."""
        if self._transport is not None:
            self._transport.write(encode(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends the connection at once, without what is still to be sent: the other end may never read it."""
        if self._transport is not None:
            self._transport.abort()


async def attach(protocol: asyncio.Protocol, connection: socket.socket) -> None:
    """Has the running loop serve a connected socket, which is the loop's to close from then on."""
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)
    except BaseException:
        connection.close()
        raise


_ENCODER = msgspec.msgpack.Encoder()
