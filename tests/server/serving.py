"""The server's HTTP part on a free port of this machine, and raw sockets to talk to it."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvloop

from hex_llm.config import Config
from hex_llm.errors import RequestError, ServerError
from hex_llm.server.errors_json import error_body, error_headers
from hex_llm.server.exchange import ClientGone, Exchange
from hex_llm.server.http_server import HttpServer

type Handler = Callable[[Exchange], Awaitable[None]]


class Serving:
    """What a test sees of the server: its port, and what has become of its requests."""

    def __init__(self, handler: Handler, config: Config):
        self._handler = handler
        self._config = config
        self.outcomes: list[str] = []
        self.loop = uvloop.new_event_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.server = HttpServer(self._app, config)
        self._thread = threading.Thread(
            target=lambda: self.loop.run_until_complete(self.server.serve(sockets=[listener]))
        )
        self._thread.start()
        wait_until(lambda: self.server.started)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send, self._config)
        outcome = "answered"
        try:
            await self._handler(exchange)
        except ClientGone:
            outcome = "gone"
        except (RequestError, ServerError) as error:
            outcome = type(error).__name__
            with contextlib.suppress(ClientGone):
                await exchange.reply(error.status, error_body(error), headers=error_headers(error))
        finally:
            exchange.close()
            self.outcomes.append(outcome)

    def stop(self) -> None:
        self.server.should_exit = True
        self.server.force_exit = True
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()

    def num_tasks(self) -> int:
        return asyncio.run_coroutine_threadsafe(self._count_tasks(), self.loop).result()

    async def _count_tasks(self) -> int:
        return len(asyncio.all_tasks())


@contextlib.contextmanager
def serving(handler: Handler, **limits: Any) -> Iterator[Serving]:
    server = Serving(handler, Config(**limits))
    try:
        yield server
    finally:
        server.stop()


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> float:
    """How long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it did not happen"
        time.sleep(0.005)
    return time.monotonic() - started


def connect(server: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def head(method: str = "GET", path: str = "/", *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: a", *headers, "", ""]).encode("latin-1")


def post(body: bytes, *headers: str) -> bytes:
    return head("POST", "/", f"Content-Length: {len(body)}", *headers) + body


def read_all(client: socket.socket) -> bytes:
    """Everything up to the server's end of the connection."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


def read_answer(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One answer with a Content-Length; leaves the connection open."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(1)
        assert part, f"the connection ended after {data!r}"
        data += part
    status, headers = parse_head(data)
    body = b""
    while len(body) < int(headers["content-length"]):
        part = client.recv(int(headers["content-length"]) - len(body))
        assert part, "the connection ended within an answer"
        body += part
    return status, headers, body


def parse_head(data: bytes) -> tuple[int, dict[str, str]]:
    line, *lines = data.split(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    return int(line.split()[1]), {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}


def ask(server: Serving, request: bytes) -> tuple[int, dict[str, str], bytes]:
    with connect(server) as client:
        client.sendall(request)
        return read_answer(client)


def error_of(body: bytes) -> dict[str, Any]:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(body) <= 8192
    return error
