"""Connections between processes by address: `unix:PATH` within a machine, `tcp:HOST:PORT` between machines.

Whoever can open a unix socket is the same user. Over TCP both ends prove that they know the key, and sign every frame.
"""

import contextlib
import secrets
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hex_llm import frames
from hex_llm.frames import Broken
from hex_llm.seal import NONCE, TAG, Numbering, Seals, proof, seals

CALL_S = 60.0  # for the other end to answer: it may be busy with its start
GREET_S = 10.0  # for whoever has called to say who it is
_BACKLOG = 128
_RETRY_S = 0.2
_LOST_AFTER_S = 20  # that TCP waits for a word from the other machine


@dataclass(frozen=True, slots=True)
class Channel:
    """A connected socket, and what signs its frames, or numbers them where no signatures are needed."""

    socket: socket.socket
    seals: Seals = field(default_factory=lambda: Seals(Numbering(), Numbering()))

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message, however long that takes."""
        self.socket.sendall(frames.encode(message, self.seals.outgoing))

    def receive[Message](self, schema: type[Message], *, timeout: float | None = None) -> Message:
        """The next message, and not a byte more. The socket blocks from then on; it is closed where this raises."""
        try:
            self.socket.settimeout(timeout)
            message = frames.read_one(self.socket, schema, self.seals.incoming)
            self.socket.settimeout(None)
        except BaseException:
            self.socket.close()
            raise
        return message


def listen(address: str) -> socket.socket:
    """A listening socket; port 0 is any that is free."""
    family, place = _place(address)
    listener = socket.socket(family)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def stop_listening(listener: socket.socket) -> None:
    """Closes it, and wakes whoever waits in `accept`: until then the kernel would let one more in."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def address_of(listener: socket.socket) -> str:
    """Where to call it."""
    name = listener.getsockname()
    return f"unix:{name}" if listener.family == socket.AF_UNIX else f"tcp:{name[0]}:{name[1]}"


def call(address: str, key: bytes, *, timeout: float = CALL_S) -> Channel:
    """Connects to whoever listens there. The socket blocks from then on. Raises OSError where nobody answers, and
    Broken where whoever does has another key.
    """
    family, place = _place(address)
    connection = socket.socket(family)
    try:
        deadline = time.monotonic() + timeout
        connection.settimeout(timeout)
        connection.connect(place)
        return _begin(connection, key, deadline, caller=True)
    except BaseException:
        connection.close()
        raise


def keep_calling(address: str, key: bytes, seconds: float) -> Channel:
    """As `call`, again and again while nobody answers: whoever is to listen there may not be there yet."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call(address, key)
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def greet(connection: socket.socket, key: bytes, *, timeout: float = GREET_S) -> Channel:
    """The other end of `call`: for a connection that a listening socket has accepted. Closes it where it raises."""
    try:
        connection.settimeout(timeout)
        return _begin(connection, key, time.monotonic() + timeout, caller=False)
    except BaseException:
        connection.close()
        raise


def _begin(connection: socket.socket, key: bytes, deadline: float, *, caller: bool) -> Channel:
    channel = Channel(connection)
    if connection.family != socket.AF_UNIX:
        _watch_over(connection)
        channel = Channel(connection, _shake_hands(connection, key, deadline, caller=caller))
    connection.settimeout(None)
    return channel


def _shake_hands(connection: socket.socket, key: bytes, deadline: float, *, caller: bool) -> Seals:
    """The caller proves itself first: whoever merely calls gets nothing to try keys on."""
    own = secrets.token_bytes(NONCE)
    connection.sendall(own)
    other = frames.read_bytes(connection, NONCE, deadline)
    nonces = own + other if caller else other + own

    def prove() -> None:
        connection.sendall(proof(key, b"caller" if caller else b"callee", nonces))

    def check() -> None:
        answer = frames.read_bytes(connection, TAG, deadline)
        if not secrets.compare_digest(answer, proof(key, b"callee" if caller else b"caller", nonces)):
            raise Broken("The other end of a connection has another HEXLLM_CLUSTER_KEY.")

    for step in (prove, check) if caller else (check, prove):
        step()
    return seals(key, nonces, caller=caller)


def _watch_over(connection: socket.socket) -> None:
    """A machine that is gone says nothing: TCP is told to find out."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options: dict[str, Any] = {
        "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": _LOST_AFTER_S * 1000
    }  # fmt: skip
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _place(address: str) -> tuple[socket.AddressFamily, Any]:
    kind, _, place = address.partition(":")
    if kind == "unix":
        return socket.AF_UNIX, place
    host, _, port = place.rpartition(":")
    family, _, _, _, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    return family, found
