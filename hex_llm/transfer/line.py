"""A connection that carries words and, after some of them, the bytes of a part.

One thread writes and one reads. Neither waits longer than `silence` for the other end.
"""

import contextlib
import socket
import struct
from typing import Any

from hex_llm import frames
from hex_llm.channel import Channel
from hex_llm.frames import Broken
from hex_llm.transfer.words import Word

_CHUNK = 2**18  # bytes that are signed at a time
_MORE = getattr(socket, "MSG_MORE", 0)  # the signature shall not travel alone


class Line:
    def __init__(self, channel: Channel, silence: float):
        self._socket, self._seals = channel.socket, channel.seals
        self._silence = silence
        # Not a timeout of Python's: that would be one for all of a message, and a large one may take long.
        limit = struct.pack("ll", int(silence), int(silence % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    @property
    def is_local(self) -> bool:
        return self._socket.family == socket.AF_UNIX

    def send(self, word: Word) -> None:
        self._write(frames.encode(word, self._seals.outgoing))

    def receive(self, schema: Any) -> Any:
        try:
            return frames.read_one(self._socket, schema, self._seals.incoming)
        except BlockingIOError:
            raise Broken(f"Nothing has been heard of it for {self._silence:g} s.") from None

    def send_bytes(self, data: memoryview) -> None:
        for start in range(0, len(data), _CHUNK):
            chunk = data[start : start + _CHUNK]
            self._write(self._seals.outgoing.sign(chunk), _MORE)
            self._write(chunk)

    def receive_bytes(self, into: memoryview) -> None:
        tag = bytearray(self._seals.incoming.size)
        for start in range(0, len(into), _CHUNK):
            chunk = into[start : start + _CHUNK]
            self._read(memoryview(tag))
            self._read(chunk)
            if not self._seals.incoming.fits(bytes(tag), chunk):
                raise Broken(f"What came of blocks {self._seals.incoming.complaint}.")

    def send_file(self, file: int) -> None:
        socket.send_fds(self._socket, [b"\0"], [file])

    def receive_file(self) -> int:
        data, files, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not data or not files:
            raise Broken("The file of shared memory that was announced did not come.")
        return files[0]

    def close(self) -> None:
        """Whoever waits in the middle of sending or reading waits no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self, data: Any, flags: int = 0) -> None:
        try:
            self._socket.sendall(data, flags)
        except BlockingIOError:
            raise Broken(f"It has read nothing for {self._silence:g} s.") from None

    def _read(self, into: memoryview) -> None:
        try:
            while into:
                if not (number := self._socket.recv_into(into)):
                    raise Broken("Its connection ended before all had come.")
                into = into[number:]
        except BlockingIOError:
            raise Broken(f"Nothing has been heard of it for {self._silence:g} s.") from None
