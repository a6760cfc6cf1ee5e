"""The other end of a connection that has to show that it is alive: a machine can go without a word, and a process can
stand still with its connections open.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hex_llm import frames
from hex_llm.channel import Channel

BEAT_S = 1.0
SILENCE_S = 20.0  # after which the other end counts as lost


class Beat(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Nothing but a sign of life."""


class Peer[Message]:
    """Sends messages and signs of life, and calls `take` for every message that comes, from a thread of its own.

    Once, and last of all, that thread calls `lost` with why there will be no more; not after `close`. Neither may
    wait for long: while they do, nobody watches.
    """

    def __init__(
        self,
        channel: Channel,
        schema: Any,
        *,
        take: Callable[[Message], None],
        lost: Callable[[str], None],
        silence: float = SILENCE_S,
    ):
        self._channel = channel
        self._take = take
        self._lost = lost
        self._silence = silence
        self._decoder = frames.Decoder[Any](schema | Beat, channel.seals.incoming)
        self._lock = threading.Lock()  # a frame is signed with its number, and must go out as that one
        self._closed = threading.Event()
        self.address = _address(channel.socket)
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True, name=f"peer {self.address}").start()

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message, however long that takes; where nobody is there any more it goes nowhere, and `lost` is
        called."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send(message)

    def close(self) -> None:
        self._closed.set()
        self._shut()

    def wait_for_end(self, seconds: float) -> None:
        """Waits for the other end to close the connection."""
        self._closed.wait(seconds)

    def _shut(self) -> None:
        """Whoever waits in the middle of sending or reading waits no more."""
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self.send(Beat())

    def _read(self) -> None:
        try:
            why = self._read_to_the_end()
        except frames.Broken as error:
            why = str(error)
        except OSError as error:
            why = f"its connection has failed ({error.strerror})"
        except MemoryError:
            why = "there is no memory for what it sends"
        was_closed = self._closed.is_set()
        self._closed.set()
        if not was_closed:
            self._lost(why)
        self._shut()
        self._channel.socket.close()

    def _read_to_the_end(self) -> str:
        heard = time.monotonic()
        # Not a timeout of the socket: that would also be one of sending. Nor `select`, which knows the first 1024 files
        # only: an HTTP process has more.
        waiting = select.poll()
        waiting.register(self._channel.socket, select.POLLIN)
        while True:
            if waiting.poll(BEAT_S * 1000):
                data = self._channel.socket.recv(2**18)
                if not data:
                    return "its connection has ended"
                heard = time.monotonic()
                for message in self._decoder.feed(data):
                    if not isinstance(message, Beat):
                        self._take(message)
            elif time.monotonic() - heard > self._silence:
                return f"nothing has been heard of it for {self._silence:g} s"


def _address(connection: socket.socket) -> str:
    name = connection.getpeername()
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)
