"""Messages between processes: length, a signature or a number where the connection has seals, then msgpack.

A schema says what may come; what does not fit it ends the connection, and nothing that comes is ever run.
"""

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

from hex_llm import faults
from hex_llm.seal import Numbering, Seal, Seals

logger = logging.getLogger(__name__)

MAX_FRAME = 64 * 2**20
_LENGTH = 4  # bytes, the highest first
_PIECE = 2**18  # bytes that are read at a time


class Broken(Exception):
    """What came is no message of ours."""


def encode(message: msgspec.Struct, seal: Seal | Numbering | None = None) -> bytes:
    """A frame. With a seal, frames must go out in the order in which they were made."""
    body = _ENCODER.encode(message)
    _check_length(len(body))
    return len(body).to_bytes(_LENGTH) + (seal.sign(body) if seal else b"") + body


class Decoder[Message]:
    """Bytes as they come to the messages that they hold. `schema` is a union of tagged structs."""

    def __init__(self, schema: Any, seal: Seal | Numbering | None = None):
        self._decoder = msgspec.msgpack.Decoder(schema)
        self._seal = seal
        self._head = _LENGTH + (seal.size if seal else 0)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH:
                length = int.from_bytes(buffer[start : start + _LENGTH])
                _check_length(length)
                body = start + self._head
                if len(buffer) < body + length:
                    break
                tag = bytes(buffer[start + _LENGTH : body])
                data = memoryview(buffer)[body : body + length].tobytes()
                start = body + length
                if self._seal is None or not faults.reach("frames.read"):
                    yield self._open(tag, data)
        finally:
            del buffer[:start]

    def _open(self, tag: bytes, body: bytes) -> Message:
        if self._seal is not None and not self._seal.fits(tag, body):
            raise Broken(f"A message {self._seal.complaint}.")
        try:
            return self._decoder.decode(body)
        except (ValueError, TypeError, RecursionError) as error:  # msgspec's own is a ValueError
            raise Broken(f"A message does not fit its schema: {error}") from None


def read_frames[Message](connection: socket.socket, decoder: Decoder[Message]) -> Iterator[Message]:
    """The messages of a blocking socket until its other end goes away."""
    while data := _receive(connection, _PIECE):
        yield from decoder.feed(data)


def read_one(connection: socket.socket, schema: Any, seal: Seal | Numbering | None = None) -> Any:
    """The next message of a blocking socket, and not a byte more."""
    head = read_bytes(connection, _LENGTH)
    length = int.from_bytes(head)
    _check_length(length)
    rest = read_bytes(connection, length + (seal.size if seal else 0))
    for message in Decoder[Any](schema, seal).feed(head + rest):
        return message
    raise Broken("A message was lost.")  # which only a fault on purpose can do


def read_bytes(connection: socket.socket, number: int, deadline: float = math.inf) -> bytes:
    """So many bytes of a blocking socket; by then, on the monotonic clock, however slowly they come."""
    data = bytearray()
    while len(data) < number:
        if deadline < math.inf:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        if not (piece := _receive(connection, min(number - len(data), _PIECE))):
            raise Broken("The connection to another process ended before all had come.")
        data += piece
    return bytes(data)


def _receive(connection: socket.socket, number: int) -> bytes:
    try:
        return connection.recv(number)
    except ConnectionResetError:
        return b""


def _check_length(length: int) -> None:
    if length > MAX_FRAME:
        raise Broken(f"A message of {length} bytes is more than {MAX_FRAME}.")


class FrameProtocol[Message](asyncio.Protocol):
    """An event loop's end of a connection: calls `take` for every message, and `lost` once when it has ended."""

    def __init__(self, schema: Any, take: Callable[[Message], None], lost: Callable[[], None]):
        self._schema = schema
        self._decoder: Decoder[Message] = Decoder(schema)
        self._seal: Seal | Numbering | None = None
        self._take = take
        self._lost = lost
        self._transport: asyncio.WriteTransport | None = None

    def use(self, seals: Seals | None) -> None:
        """Signs what goes out, and checks what comes in; before the first of either."""
        if seals is not None:
            self._seal = seals.outgoing
            self._decoder = Decoder(self._schema, seals.incoming)

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
            self._transport.write(encode(message, self._seal))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends the connection at once, without what is still to be sent: the other end may never read it."""
        if self._transport is not None:
            self._transport.abort()


async def attach(protocol: FrameProtocol[Any], connection: socket.socket, seals: Seals | None = None) -> None:
    """Has the running loop serve a connected socket, which is the loop's to close from then on."""
    protocol.use(seals)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)
    except BaseException:
        connection.close()
        raise


_ENCODER = msgspec.msgpack.Encoder()
