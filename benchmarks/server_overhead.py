"""What the HTTP process costs: tokens per second through it, next to a bare uvicorn handler that sends the same bytes.

    .venv/bin/python benchmarks/server_overhead.py [--streams 128] [--tokens 400]

Both servers run on one core, alone; what they talk to, a fake engine that answers at once and a client that only counts
bytes, is on the others. The fake engine sends the next step when the last one has been read, so that every token
travels in an event of its own. The bare handler has nothing to do but to send: it knows all its events beforehand.
"""

import argparse
import array
import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from typing import cast

import httpx
import orjson
import uvicorn
import uvloop

from hex_llm import frames, log
from hex_llm.channel import address_of, call, listen
from hex_llm.config import Config
from hex_llm.engine.limits import Limits
from hex_llm.engine.output import Output, Stats
from hex_llm.engine.request import FinishReason
from hex_llm.engine.wire import Abort, Add, Alive, Found, Hello, Ready, Stepped, ToEngine
from hex_llm.process import machine
from hex_llm.server.front import run_front
from hex_llm.server.h11_protocol import protocol_class
from hex_llm.server.launch import bind

CORES = os.cpu_count() or 1
CONTEXT, VOCABULARY = 2048, 2048
TOKEN = 300  # any that has a text


def fake_engine(door: str) -> None:
    """Speaks for an engine: one token for every request in every step, as fast as they are read."""
    connection = call(door, b"").socket
    decoder = frames.Decoder[ToEngine](ToEngine)
    limits = Limits(
        vocab_size=VOCABULARY, max_model_len=CONTEXT, num_blocks=2**16, block_size=32, max_running=1024, max_prefills=1,
        step_tokens=8192,
    )  # fmt: skip
    send = lambda message: connection.sendall(frames.encode(message))  # noqa: E731
    send(Hello(0, os.getpid(), machine()))
    send(Found(CONTEXT, VOCABULARY))
    send(Ready(limits, "none", "none"))
    left: dict[str, int] = {}
    stats = Stats(0, 0, 2**16, 0, 0, 0, 0, 0, 0)
    last_alive = time.monotonic()
    while True:
        connection.settimeout(0 if left else 1)
        try:
            data = connection.recv(2**18)
            if not data:
                return
            for message in decoder.feed(data):
                match message:
                    case Add(request):
                        left[request.id] = request.max_output
                    case Abort(request_ids):
                        for request_id in request_ids:
                            left.pop(request_id, None)
        except (BlockingIOError, TimeoutError):
            pass
        connection.settimeout(None)
        if time.monotonic() - last_alive > 1:
            last_alive = time.monotonic()
            send(Alive(stats, 0))
        if not left:
            continue
        outputs = []
        for request_id, count in list(left.items()):
            left[request_id] = count - 1
            outputs.append(Output(request_id, (TOKEN,), None, FinishReason.LENGTH if count == 1 else None, 0))
            if count == 1:
                del left[request_id]
        send(Stepped(outputs, []))
        while _unread(connection):
            time.sleep(0.0001)


def _unread(connection: socket.socket) -> int:
    """Bytes that the other end has not read."""
    size = array.array("i", [0])
    fcntl.ioctl(connection, termios.TIOCOUTQ, size)
    return size[0]


def ours(port: int) -> int:
    """The HTTP process, with the fake engine for its engine."""
    log.configure()
    config = Config(host="127.0.0.1", port=port, disable_log_requests=True)
    with tempfile.TemporaryDirectory() as folder:
        door = listen(f"unix:{folder}/door")
        subprocess.Popen(
            ["taskset", "-c", _others(), sys.executable, __file__, "--role=engine", f"--door={address_of(door)}"]
        )
        return run_front(config, bind(config), door, b"", fleet=None)


def bare(port: int, events: int, event: bytes) -> None:
    """A handler that sends as many events of as many bytes."""

    async def app(scope, receive, send) -> None:
        while (await receive())["more_body"]:
            pass
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(events):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)  # as it is where tokens come one by one
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    settings = uvicorn.Config(
        app, http=protocol_class(Config()), lifespan="off", log_config=None, access_log=False, ws="none", loop="uvloop"
    )
    server = uvicorn.Server(settings)
    uvloop.run(server.serve(sockets=[bind(Config(host="127.0.0.1", port=port))]))


class Reader(asyncio.Protocol):
    """Sends one request and counts what comes."""

    def __init__(self, request: bytes):
        self._request = request
        self.bytes = self.events = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self.bytes += len(data)
        self.events += data.count(b"data: ")
        if data.endswith(b"0\r\n\r\n"):
            self.done.set_result(None)

    def connection_lost(self, exc) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the stream was cut"))


async def _measure(port: int, streams: int, body: bytes) -> tuple[float, int, int]:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    request = (head % len(body)).encode() + body
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    readers = []
    for _ in range(streams):
        _, reader = await loop.create_connection(lambda: Reader(request), "127.0.0.1", port)
        readers.append(reader)
    await asyncio.gather(*(reader.done for reader in readers))
    seconds = time.perf_counter() - started
    return seconds, sum(reader.bytes for reader in readers), sum(reader.events for reader in readers)


def _others() -> str:
    return f"1-{CORES - 1}"


def _cpu(pid: int) -> float:
    fields = open(f"/proc/{pid}/stat").read().rpartition(") ")[2].split()  # noqa: PTH123, SIM115
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _run(role: list[str], port: int, streams: int, tokens: int, rounds: int) -> dict[str, float]:
    command = ["taskset", "-c", "0", sys.executable, __file__, f"--port={port}", *role]
    process = subprocess.Popen(command)
    try:
        _wait(port, process)
        body = orjson.dumps(
            {"prompt": [1, 2, 3], "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0,
             "stream_options": {"include_usage": False}}
        )  # fmt: skip
        results = []
        for _ in range(rounds):
            before = _cpu(process.pid)
            seconds, size, events = uvloop.run(_measure(port, streams, body))
            results.append({
                "tokens_per_s": streams * tokens / seconds,
                "events": events / streams,
                "cpu_us_per_token": 1e6 * (_cpu(process.pid) - before) / (streams * tokens),
                "bytes_per_event": size / events,
            })  # fmt: skip
        return max(results, key=lambda each: each["tokens_per_s"])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _wait(port: int, process: subprocess.Popen) -> None:
    while process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ping").status_code != 503:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=7190)
    parser.add_argument("--role", choices=("engine", "ours", "bare"))
    parser.add_argument("--door")
    parser.add_argument("--events", type=int)
    parser.add_argument("--event-bytes", type=int)
    arguments = parser.parse_args()
    match arguments.role:
        case "engine":
            fake_engine(arguments.door)
        case "ours":
            sys.exit(ours(arguments.port))
        case "bare":
            bare(arguments.port, arguments.events, b"data: " + b"x" * (arguments.event_bytes - 8) + b"\n\n")
        case None:
            compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    os.sched_setaffinity(0, range(1, CORES))
    sizes = arguments.streams, arguments.tokens, arguments.rounds
    with_us = _run(["--role=ours"], arguments.port, *sizes)
    # As many events, of as many bytes, as ours were; the bytes of chunked encoding come on top in both.
    events, size = round(with_us["events"]), round(with_us["bytes_per_event"]) - 6
    alone = _run(["--role=bare", f"--events={events}", f"--event-bytes={size}"], arguments.port + 1, *sizes)
    for name, result in (("hex-llm", with_us), ("bare uvicorn", alone)):
        print(f"{name:14}" + "".join(f"  {key} {value:,.1f}" for key, value in result.items()))
    print(f"share {with_us['tokens_per_s'] / alone['tokens_per_s']:.2f}")


if __name__ == "__main__":
    main()
