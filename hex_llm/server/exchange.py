"""One HTTP request and its answer, over ASGI, within the limits of the server."""

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hex_llm.config import Config
from hex_llm.errors import RequestTimeout, TooLarge, Unavailable, WrongMediaType
from hex_llm.server.json_body import read_object

# Our protocol (h11_protocol.py) puts a function under this name into the scope's state, that drops the connection
# together with what was not sent yet: ASGI has no word for that.
ABORT = "abort_connection"

BASE_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))

# A client that is refused while it sends gets this long to send the rest. Were the connection closed at once, the
# answer would be lost on the way with it.
LINGER_S = 3.0
LINGER_BYTES = 64 * 2**20

_BYTES_PER_SECOND = 100 * 2**10
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_JSON_TYPE = re.compile(r'application/json\s*(;\s*charset\s*=\s*"?utf-?8"?\s*)?;?', re.IGNORECASE)
_STALL_CHECKS = 4
_PIECE_BYTES = 2**18


class ClientGone(Exception):
    """Nobody is there to read the answer, or nobody reads it."""


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


class Exchange:
    """`gone` is set as soon as the client has left, once the body was read, and the handler is broken off; `close` ends
    the watch over it.
    """

    def __init__(self, scope: Any, receive: Any, send: Any, config: Config, key_id: str | None = None):
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Mapping[str, str] = _headers(scope["headers"])
        self.client: str = (scope.get("client") or ("-",))[0]  # its address
        self.request_id = new_request_id()
        label = self.headers.get("x-request-id", "")
        self.label = label if REQUEST_ID.fullmatch(label) else self.request_id  # as the client knows it
        self.key_id = key_id
        self.started = time.monotonic()
        self.status: int | None = None
        self.gone = asyncio.Event()
        # What the answer is made with, for the line in the log.
        self.generation: Any = None

        self._config = config
        self._receive = receive
        self._send = send
        self._abort = scope.get("state", {}).get(ABORT)
        self._body_expected = self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers
        self._ended = False
        self._task: asyncio.Task[Any] | None = None
        self._failure: Exception | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._writes = 0
        self._writing = False

    @property
    def begun(self) -> bool:
        """Whether a part of the answer was sent."""
        return self.status is not None

    async def body(self) -> bytes:
        """The body, once. Refuses one that is too large, too slow or encoded."""
        self._check_framing()
        limit = self._config.max_body_bytes
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._config.body_timeout_s) as deadline:
                more = True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self.gone.set()
                        raise ClientGone
                    parts.append(message["body"])
                    size += len(message["body"])
                    more = message["more_body"]
                    if size > limit:
                        raise TooLarge(f"The request body is larger than {limit} bytes, the most that is taken.")
                    if more:
                        allowed = self._config.body_timeout_s + size / _BYTES_PER_SECOND
                        now = asyncio.get_running_loop().time()
                        deadline.reschedule(now + self.started + allowed - time.monotonic())
        except TimeoutError:
            seconds = time.monotonic() - self.started
            raise RequestTimeout(f"Only {size} bytes of the request body came in {seconds:.0f} seconds.") from None
        self._body_expected = False
        self._watch_client()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def json(self) -> dict[str, Any]:
        """The JSON object in the body."""
        kind = self.headers.get("content-type")
        if kind is not None and not _JSON_TYPE.fullmatch(kind.strip()):
            raise WrongMediaType(f"Content-Type is {kind[:100]!r}; send 'Content-Type: application/json'.")
        return await read_object(await self.body(), self._config.max_json_depth)

    async def reply(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """The whole answer."""
        if status not in (204, 304):
            headers = [("Content-Length", str(len(body))), *headers]
        await self._start(status, content_type, headers)
        # Piece by piece, so that it waits for a client that is slow: a transport may take in any amount at once.
        while len(body) > _PIECE_BYTES:
            await self._write(body[:_PIECE_BYTES], more=True)
            body = body[_PIECE_BYTES:]
        if self._body_expected:
            # The length of the answer tells the client where it ends, so that it need not wait for the last message.
            await self._write(body, more=True)
            await self._linger()
            body = b""
        self._ended = True
        await self._write(body, more=False)

    async def begin_stream(
        self, content_type: str = "text/event-stream", headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        self._watch_client()
        await self._start(200, content_type, headers)

    async def send(self, data: bytes) -> None:
        """A part of a stream. Waits while the client is behind with reading."""
        # This runs for every token of every stream: no task, no timer, no call that can be spared.
        if self.gone.is_set():
            raise ClientGone
        self._writing = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing = False
        self._writes += 1
        if self.gone.is_set():
            raise ClientGone

    async def end_stream(self) -> None:
        if self.gone.is_set():
            raise ClientGone
        self._ended = True
        await self._write(b"", more=False)

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Until the body ends, `fail` breaks it off: whatever it waits for raises, and `cause` says why."""
        self._task = asyncio.current_task()
        try:
            yield
        finally:
            self._task = None

    def fail(self, error: Exception) -> None:
        """Has the request end with this error, however far it has come. The first one counts."""
        if self._task is not None and self._failure is None:
            self._failure = error
            self._task.cancel()

    def cause(self, error: BaseException) -> Exception:
        """What an exception stands for: where it broke the handler off, the reason for that."""
        if isinstance(error, Exception):
            return error
        if self._failure is None:  # by whoever ends the process
            return Unavailable("The server shut down before the answer was finished.", code="server_shutdown")
        if task := asyncio.current_task():
            task.uncancel()
        return self._failure

    def close(self) -> None:
        """Call this at the end, whatever happened. An answer that was begun and not ended is cut off."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        if self.begun and not self._ended and not self.gone.is_set():
            self._drop()
        self._ended = True
        if self._watcher is not None:
            self._watcher.cancel()

    def _check_framing(self) -> None:
        length = self.headers.get("content-length")
        limit = self._config.max_body_bytes
        if length is not None and length.isdecimal() and int(length) > limit:
            raise TooLarge(f"The request body is {length} bytes, more than the {limit} that are taken.")
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise WrongMediaType(f"Content-Encoding is {encoding[:100]!r}; send the body as it is.")

    async def _start(self, status: int, content_type: str, headers: Sequence[tuple[str, str]]) -> None:
        if self.gone.is_set():
            raise ClientGone
        self.status = status
        encoded = [
            *BASE_HEADERS,
            (b"content-type", content_type.encode("latin-1")),
            (b"x-request-id", self.label.encode("latin-1")),
            *((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers),
        ]
        if self._body_expected:
            encoded.append((b"connection", b"close"))
        self._stall_timer = asyncio.get_running_loop().call_later(
            self._config.write_timeout_s / _STALL_CHECKS, self._check_stall, -1, 0
        )
        self._writing = True
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})
        self._writing = False
        self._writes += 1

    async def _write(self, body: bytes, *, more: bool) -> None:
        self._writing = True
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._writing = False
        self._writes += 1
        if self.gone.is_set():
            raise ClientGone

    async def _linger(self) -> None:
        size = 0
        try:
            async with asyncio.timeout(LINGER_S):
                while size <= LINGER_BYTES:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message["more_body"]:
                        return
                    size += len(message["body"])
        except TimeoutError:
            return

    def _watch_client(self) -> None:
        if self._watcher is None and not self._body_expected:
            self._watcher = asyncio.get_running_loop().create_task(self._wait_until_gone())

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # The end of the answer is told in the same way.
        if not self._ended:
            self._leave()

    def _check_stall(self, writes: int, checks: int) -> None:
        """One timer for a whole answer: it looks now and then whether the same write has been waiting all along."""
        checks = checks + 1 if self._writing and writes == self._writes else 0
        if checks == _STALL_CHECKS:
            self._leave()
            self._drop()
            return
        self._stall_timer = asyncio.get_running_loop().call_later(
            self._config.write_timeout_s / _STALL_CHECKS, self._check_stall, self._writes, checks
        )

    def _leave(self) -> None:
        self.gone.set()
        self.fail(ClientGone())

    def _drop(self) -> None:
        if self._abort is not None:
            self._abort()


def _headers(pairs: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Names in lower case; a name that comes twice has both values, as HTTP says."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in pairs:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
