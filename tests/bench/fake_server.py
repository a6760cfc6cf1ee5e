"""A server with OpenAI's routes and /generate whose tokens, times and faults are the test's to choose."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

NO_FAULT = ""


class FakeServer:
    """Answers every prompt with max_tokens tokens `t0 t1 ...`, one per chunk, in a thread of its own.

    `fault` names what goes wrong with the request of a number; NO_FAULT is nothing. `metrics` makes the text of
    /metrics from the number of requests that came before; None is a server that has none.
    """

    def __init__(
        self,
        *,
        prefill_s: float = 0.0,
        gap_s: float = 0.0,
        usage: bool = True,
        models: tuple[str, ...] = ("fake",),
        fault: Callable[[int], str] = lambda number: NO_FAULT,
        metrics: Callable[[int], str] | None = None,
    ):
        self.metrics = metrics
        self.prefill_s, self.gap_s, self.usage, self.models, self.fault = prefill_s, gap_s, usage, models, fault
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.connections = 0
        self.running = self.peak = 0
        self.url = ""
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *args: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        self._tasks: set[asyncio.Task] = set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                text = head.decode()
                self.heads.append(text)
                size = next((line.split(":")[1] for line in text.split("\r\n") if line.startswith("Content-Le")), 0)
                body = json.loads(await reader.readexactly(int(size)) or b"null")
                self.running += 1
                self.peak = max(self.peak, self.running)
                try:
                    await self._answer(text.split()[1], body, writer)
                finally:
                    self.running -= 1
        except (EOFError, OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            _whole(writer, {"object": "list", "data": [{"id": name} for name in self.models]})
            return
        if path == "/metrics":
            text = (self.metrics(len(self.bodies)) if self.metrics else "not here").encode()
            status = "200 OK" if self.metrics else "404 Not Found"
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
            return
        fault = self.fault(len(self.bodies))
        self.bodies.append(body)
        if fault == "hang":
            await asyncio.sleep(60)
        if fault == "drop":
            raise EOFError
        if fault == "status":
            _whole(writer, {"error": {"message": "The queue is full.", "code": "queue_full"}}, "429 Too Many")
            return
        if fault == "page":
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 11\r\nConnection: close\r\n\r\n<p>bad</p>\n")
            return
        await asyncio.sleep(self.prefill_s)
        if "instances" in body:
            texts = [" ".join(_tokens(instance["max_tokens"])) for instance in body["instances"]]
            raw = body["instances"][0].get("raw_response")
            counts = {"output_token_counts": [len(text.split()) for text in texts]} if raw else {}
            _whole(writer, {"predictions": texts} | counts)
            return
        stream = self._documents(body, fault) if path == "/generate" else self._events(path, body, fault)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for pause, piece in stream:
            await asyncio.sleep(pause)
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
        if fault == "close":
            raise EOFError
        writer.write(b"0\r\n\r\n")

    def _events(self, path: str, body: dict[str, Any], fault: str):
        chat = "chat" in path
        tokens = _tokens(body.get("max_completion_tokens", body.get("max_tokens")))
        if chat:
            yield 0, _event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for number, token in enumerate(tokens):
            choice = {"delta": {"content": token + " "}} if chat else {"text": token + " "}
            choice["finish_reason"] = "length" if number == len(tokens) - 1 else None
            yield (self.gap_s if number else 0), _event({"choices": [choice], "usage": None})
            if number == 1 and fault == "error":
                yield 0, b'event: error\ndata: {"error": {"message": "The engine died."}}\n\n'
                return
            if number == 1 and fault == "garbage":
                yield 0, b"data: {]\n\n"
            if number == 1 and fault == "shape":
                yield 0, b'data: {"choices": ["text"]}\n\n'
            if number == 1 and fault == "close":
                return
        if self.usage:
            prompt = body["messages"][0]["content"] if chat else body["prompt"]
            size = len(prompt) if isinstance(prompt, list) else len(prompt.split())
            yield 0, _event({"choices": [], "usage": {"prompt_tokens": size, "completion_tokens": len(tokens)}})
        if fault != "no done":
            yield 0, b"data: [DONE]\n\n"

    def _documents(self, body: dict[str, Any], fault: str):
        between = b"\0" if body.get("stream") else b""
        for number, token in enumerate(_tokens(body["max_tokens"])):
            document = {"predictions": [token + " "]} | (
                {"output_token_counts": [1]} if body.get("raw_response") else {}
            )
            yield (self.gap_s if number else 0), json.dumps(document).encode() + between
            if number == 1 and fault == "error":
                yield 0, b'{"error": {"message": "The engine died."}}'
                return
            if number == 1 and fault == "close":
                return


def _tokens(count: int) -> list[str]:
    return [f"t{number}" for number in range(count)]


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def _whole(writer: asyncio.StreamWriter, value: dict[str, Any], status: str = "200 OK") -> None:
    content = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
