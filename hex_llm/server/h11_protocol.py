"""uvicorn's HTTP/1.1 over h11, with limits on what a client may send and on the time it may take.

What cannot become a request is answered with an error object, and the connection is closed. Parts of an answer take
the same way as in uvicorn; nothing here is called for them.
"""

import asyncio
import logging
import re
import socket
import struct
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from hex_llm.config import Config
from hex_llm.errors import HeadersTooLarge, RequestError, RequestTimeout, ServerError, TooLarge, Unavailable
from hex_llm.server.errors_json import error_body, error_headers
from hex_llm.server.exchange import ABORT, BASE_HEADERS, LINGER_BYTES, LINGER_S, new_request_id

logger = logging.getLogger(__name__)
# uvicorn warns of every malformed request. The client that sent it is told; a log that anybody can fill is no use.
logger.setLevel(logging.ERROR)


# So much of the next request is taken in while one is under way. Beyond it the connection is not read, and a client
# that goes away is noticed only when something is written to it.
_MAX_AHEAD = 256 * 2**10
_DROP = struct.pack("ii", 1, 0)  # SO_LINGER for no time: what is left is thrown away
_END_OF_HEAD = re.compile(rb"\n\r?\n")


def protocol_class(config: Config) -> type[H11Protocol]:
    """The class that uvicorn makes one object of for each connection."""

    class LimitedProtocol(_Protocol):
        limits = config

    return LimitedProtocol


class _Connection(h11.Connection):
    """h11's state of a connection, with limits on heads and chunks. `refusal` is why `next_event` has raised."""

    def __init__(self, limits: Config):
        super().__init__(h11.SERVER, limits.max_head_bytes)
        self._limits = limits
        self._chunks = 0
        self.refusal: RequestError | None = None

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            self._check_head(self.trailing_data[0])
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                raise self._refuse(self._head_too_large()) from None
            raise
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            if self._chunks > self._limits.max_chunks:
                raise self._refuse(TooLarge(f"The request body has more than {self._limits.max_chunks} chunks."))
        elif isinstance(event, h11.Request):
            self._chunks = 0
            self._check_request(event)
        return event

    def _check_head(self, data: bytes) -> None:
        """Before h11 takes a head apart: it looks at the size of those only that come in pieces."""
        end = _END_OF_HEAD.search(data)
        size = end.end() if end else len(data)
        if size > self._limits.max_head_bytes:
            raise self._refuse(self._head_too_large())
        if data.count(b"\n", 0, size) > self._limits.max_headers + 2:
            raise self._refuse(HeadersTooLarge(f"The request has more than {self._limits.max_headers} headers."))

    def _check_request(self, request: h11.Request) -> None:
        names = {name for name, _ in request.headers}
        version = request.http_version.decode("ascii")
        if version not in ("1.0", "1.1"):
            raise self._refuse(RequestError(f"HTTP/{version} is not spoken here; use HTTP/1.1."))
        if b"transfer-encoding" in names:
            if b"content-length" in names:
                both = "The request has both Content-Length and Transfer-Encoding; it may have one."
                raise self._refuse(RequestError(both))
            if version == "1.0":
                raise self._refuse(RequestError("A request in HTTP/1.0 cannot have a Transfer-Encoding."))

    def _head_too_large(self) -> HeadersTooLarge:
        limit = self._limits.max_head_bytes
        return HeadersTooLarge(f"The request's line and headers are larger than {limit} bytes, the most that is taken.")

    def _refuse(self, refusal: RequestError) -> h11.RemoteProtocolError:
        self.refusal = refusal
        return h11.RemoteProtocolError("refused")


class _Protocol(H11Protocol):
    limits: Config

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.conn: _Connection = _Connection(self.limits)
        self.timeout_keep_alive = self.limits.keep_alive_timeout_s
        self.logger = logger
        self.access_log = False
        # The scope of each request has a copy of this state.
        self.app_state = {**self.app_state, ABORT: self._abort}
        self._head_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._lingering = False
        self._discarded = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.limits.max_connections
        if len(self.connections) > 2 * most:
            # Even to say no to all of them would be too much.
            transport.abort()
        elif len(self.connections) > most:
            self._refuse(
                Unavailable(f"The server has {most} connections, the most it takes.", code="too_many_connections")
            )
        else:
            self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self.transport.abort()
            return
        if self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED):
            # What comes after the last request of a connection is no fault of that request.
            return
        super().data_received(data)
        # h11 stops at what comes ahead of its turn. Reading on is the only way to learn that the client has gone.
        if self.flow.read_paused and self.conn.their_state is not h11.SEND_BODY:
            ahead, _ = self.conn.trailing_data
            if len(ahead) <= _MAX_AHEAD:
                self.flow.resume_reading()
        self._time_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_end()
        elif self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            # The answer was given before all of the body was there. There is no telling how much is still to come.
            self._linger()
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._unset_keepalive_if_required()
            self._time_head()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_end()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self.conn.refusal or RequestError("The request is not valid HTTP/1.1."))

    def _should_upgrade(self) -> bool:
        return False

    def _abort(self) -> None:
        """Drops the connection with what was not sent yet. Without the option the kernel would go on offering it, up to
        megabytes for each connection, to a client that does not read for as long as that client likes.
        """
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.fileno() >= 0:  # else it is closed already
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP)
        self.transport.abort()

    def _time_head(self) -> None:
        """Has the timer run while a head is to come, and only then."""
        waiting = self.conn.their_state is h11.IDLE and not self._lingering and not self.transport.is_closing()
        if waiting and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._head_is_late)
        elif not waiting and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.conn.trailing_data[0]:
            # Nothing was asked, so there is nothing to answer.
            self.transport.close()
            return
        seconds = self.limits.head_timeout_s
        self._refuse(RequestTimeout(f"The request's line and headers did not come within {seconds:g} seconds."))

    def _refuse(self, error: RequestError | ServerError) -> None:
        """Answers in place of the application, if an answer is still due, and has no more of the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id = new_request_id()
            body = error_body(error)
            headers = [
                *BASE_HEADERS,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
                (b"x-request-id", request_id.encode("ascii")),
                *((name.encode("ascii"), value.encode("ascii")) for name, value in error_headers(error)),
            ]
            phrase = STATUS_PHRASES[error.status]
            response = h11.Response(status_code=error.status, headers=headers, reason=phrase)
            for event in (response, h11.Data(data=body), h11.EndOfMessage(), h11.ConnectionClosed()):
                self.transport.write(self.conn.send(event) or b"")
            self._linger()
        else:
            self.transport.close()
            self._watch_end()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _linger(self) -> None:
        """Lets the client finish what it sends. Closed at once, the connection would be reset, and the answer lost."""
        self._lingering = True
        self._unset_keepalive_if_required()
        self._time_head()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._end_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _watch_end(self, left: int | None = None) -> None:
        """Drops a connection that is to close, if the client takes nothing of what is left to send."""
        size = self.transport.get_write_buffer_size()
        if left is not None and size >= left:
            self._abort()
        elif size:
            self._end_timer = self.loop.call_later(self.limits.write_timeout_s, self._watch_end, size)
