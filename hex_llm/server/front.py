"""An HTTP process, from its first answer (503, starting) to its last.

It is ready once the engines and the text side are; it drains at SIGTERM, and ends at once at a second one; it ends when
no engine is left: nothing that is under way goes without an answer.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from hex_llm.command import run_command
from hex_llm.config import Config
from hex_llm.engine.router import Router
from hex_llm.engine.wire import Found
from hex_llm.errors import EngineDead, HexError, ServerError, StartError, Unavailable
from hex_llm.launch.fleet import POLL_S, Fleet
from hex_llm.lora.open_store import open_store
from hex_llm.process import CLUSTER_KEY, ENGINE_DIED, ENGINE_HUNG, begin_child, hold_signals, release_signals
from hex_llm.server.adapters import Adapters
from hex_llm.server.app import keep_time, make_app
from hex_llm.server.background import in_background
from hex_llm.server.engines import Engines
from hex_llm.server.http_server import HttpServer
from hex_llm.server.keys import Keys
from hex_llm.server.request_log import log_throughput
from hex_llm.server.state import Phase, Server
from hex_llm.server.supervise import DRAIN, DRAINING, END_NOW, SAME_SIGNAL_S
from hex_llm.source import text_folders
from hex_llm.text.chat import TEMPLATE_KWARGS
from hex_llm.text.client import TextClient
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.text.wire import TextSettings

logger = logging.getLogger("hex_llm.server.front")  # whose own name may be __main__

_LINGER_S = 3.0  # that a server without an engine still answers, so that health checks see it
_SAY_S = 5.0  # how often a drain says what is left
_ANSWER_S = 4.0  # that the last answers have to go out
_CONNECT_S = 1.0  # that the last words of an engine that has ended may still take to come


def run_front(
    config: Config, listener: socket.socket, door: socket.socket, key: bytes, *, fleet: Fleet | None, index: int = 0
) -> int:
    """Serves until it is told to stop, or no engine is left; returns the exit code. Engines connect to `door`.

    Alone, it looks after the fleet, and is told with the user's signals; one of several has no fleet, and is told by
    `supervise`.
    """
    keys = Keys.load(config, os.environ)

    async def live() -> int:
        return await _Front(config, keys, door, key, fleet, index).run(listener)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(live())


class _Front:
    def __init__(self, config: Config, keys: Keys, door: socket.socket, key: bytes, fleet: Fleet | None, index: int):
        self._config = config
        self._fleet = fleet
        self._started = time.monotonic()
        num_prefill = config.topology.prefill if config.topology else 0
        self._router = Router(config.num_engines, num_prefill=num_prefill, queue_timeout=config.queue_timeout_s)
        self._engines = Engines(config, self._router, door, key, fleet)
        self._server = Server(config, self._router, keys, index=index)
        self._http = HttpServer(make_app(self._server), config)
        self._server.connections = self._http.server_state.connections
        self._stop = asyncio.Event()  # told to
        self._told_at = 0.0
        self._hurry = asyncio.Event()  # told twice

    async def run(self, listener: socket.socket) -> int:
        self._take_signals()
        http = asyncio.create_task(self._http.serve(sockets=[listener]))
        jobs = [self._engines.let_in(), self._engines.watch(), keep_time(self._server), log_throughput(self._server)]
        if self._fleet is not None:
            jobs.append(self._keep(self._fleet))
        helpers = [asyncio.create_task(each) for each in jobs]
        try:
            return await self._live(_url(self._config, listener), [http, *helpers])
        finally:
            hold_signals()  # all has been said
            for task in helpers:
                task.cancel()
            self._http.should_exit = True
            await asyncio.gather(http, *helpers, return_exceptions=True)
            if hasattr(self._server, "text"):
                await self._server.text.close()
            self._engines.close()
            self._router.close()

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        if self._fleet is None:
            loop.add_signal_handler(DRAIN, self._stop.set)
            loop.add_signal_handler(END_NOW, self._hurry.set)
        else:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._told_to_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._server.keys.reload)
        release_signals()

    async def _keep(self, fleet: Fleet) -> None:
        """Looks after the engines' processes. Runs until it is cancelled."""
        while True:
            fleet.poll(restart=not self._stop.is_set())
            if fleet.exit_code is not None and not self._router.lost.is_set():
                await asyncio.sleep(_CONNECT_S)
                if not self._router.lost.is_set():  # else its connection has told
                    self._router.exit_code = fleet.exit_code if fleet.exit_code != ENGINE_DIED else None
                    self._router.lost.set()
            await asyncio.sleep(POLL_S)

    async def _live(self, url: str, parts: Sequence[asyncio.Task[None]]) -> int:
        """From the start to the end; returns the exit code. The parts run all the while: one that ends has failed."""
        start = asyncio.create_task(self._get_ready(url))
        stop = asyncio.create_task(self._stop.wait())
        lost = asyncio.create_task(self._router.lost.wait())
        try:
            await asyncio.wait([start, stop, lost, *parts], return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()  # which may be that it cannot
                await asyncio.wait([stop, lost, *parts], return_when=asyncio.FIRST_COMPLETED)
            if failed := [part for part in parts if part.done()]:
                return await self._break_down(failed[0])
            if not lost.done():
                await self._drain()
            return await self._lose_engine() if lost.done() else 0
        finally:
            for task in (start, stop, lost):
                task.cancel()

    async def _get_ready(self, url: str) -> None:
        config, server = self._config, self._server
        # Here too: the engine may be on another machine. And first: what cannot be had is told before it has JAX.
        folder, model = await in_background(lambda: text_folders(config))
        found = await self._router.found
        tokenizer = asyncio.to_thread(Tokenizer.load, folder, mode=config.tokenizer_mode, model_folder=model)
        text = TextClient.start(_text_settings(config, found, folder, model))
        server.tokenizer, server.text = await asyncio.gather(tokenizer, text)
        server.tokenizer.check_embedding(found.vocab_size)
        if config.enable_lora:
            server.adapters = Adapters(config, open_store(config), found.modules, server.metrics.count_lora_load)
            await server.adapters.check_named()
        ready = await self._router.ready
        server.limits, server.ready = ready.limits, ready
        server.phase = Phase.READY
        logger.info(
            "Ready after %.1f s on %s (%s): %s at %s.",
            time.monotonic() - self._started, ready.device, ready.dtype, ", ".join(server.names), url,
        )  # fmt: skip

    def _told_to_stop(self, number: int) -> None:
        if self._stop.is_set():
            if time.monotonic() - self._told_at <= SAME_SIGNAL_S:
                return
            self._hurry.set()
        what = "ends now." if self._hurry.is_set() else DRAINING.format(self._config.drain_timeout_s)
        logger.warning("%s: %s", signal.Signals(number).name, what)
        self._told_at = time.monotonic()
        self._stop.set()

    async def _drain(self) -> None:
        """Finishes what is under way, as far as there is time; the rest is told."""
        server, started = self._server, time.monotonic()
        ready, server.phase = server.phase == Phase.READY, Phase.DRAINING
        deadline = started + self._config.drain_timeout_s
        said = started
        # While it starts there is nothing that could be finished.
        while ready and self._is_busy and time.monotonic() < deadline and not self._hurry.is_set():
            if time.monotonic() - said >= _SAY_S:
                said = time.monotonic()
                logger.info("%d requests are left to finish.", server.num_open)
            await asyncio.sleep(0.05)
        server.fail_all(Unavailable("The server shut down before the answer was finished.", code="server_shutdown"))
        await self._answered()

    async def _break_down(self, part: asyncio.Task[None]) -> int:
        logger.critical("A part of the server failed, and the server with it.", exc_info=part.exception())
        self._server.phase = Phase.DEAD
        self._server.fail_all(ServerError("The server failed before the answer was finished."))
        await self._answered()
        return 1

    async def _lose_engine(self) -> int:
        """Everybody has been told by now, or is about to be."""
        server = self._server
        server.phase = Phase.DEAD
        exit_code = self._router.exit_code
        if exit_code is not None and not self._router.ready.done():  # it could not start, and has said why
            return exit_code
        hung = len(self._engines.hung) == self._config.num_engines
        reason = "hung" if hung else "died"
        server.metrics.engine_deaths.labels(reason).inc()
        logger.critical("The engine's %s %s; the server ends.", self._engines.describe(), reason)
        server.fail_all(EngineDead("The engine stopped before it had the request.", status=500))
        await self._answered()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), _LINGER_S)
        if exit_code is None:
            exit_code = ENGINE_HUNG if hung else ENGINE_DIED
        return exit_code

    @property
    def _is_busy(self) -> bool:
        """An answer that has been given may still be on its way."""
        return self._server.num_open > 0 or self._http.has_unsent

    async def _answered(self) -> None:
        """Until the last answers have gone out."""
        deadline = time.monotonic() + _ANSWER_S
        while self._is_busy and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


def _text_settings(config: Config, found: Found, folder: Path, model: Path) -> TextSettings:
    names = (config.chat_template_kwargs or "").split(",")
    return TextSettings(
        tokenizer_folder=str(folder),
        max_model_len=found.max_model_len,
        mode=config.tokenizer_mode,
        model_folder=str(model),
        chat_template=config.chat_template,
        template_kwargs=(*TEMPLATE_KWARGS, *(name.strip() for name in names if name.strip())),
        template_timeout_s=config.template_timeout_s,
        template_bytes=config.template_memory_mib * 2**20,
    )


def _url(config: Config, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if config.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def main(argv: Sequence[str]) -> int:
    """One of several HTTP processes, as `supervise` starts them. Why it fails it tells the one that did."""
    begin_child()
    settings, *numbers = argv
    listener, door, index = map(int, numbers)
    config = msgspec.json.decode(settings, type=Config)
    key = os.environ.pop(CLUSTER_KEY, "").encode()
    sockets = socket.socket(fileno=listener), socket.socket(fileno=door)
    try:
        return run_front(config, *sockets, key, fleet=None, index=index)
    except HexError as error:
        print(error)
        return error.exit_code if isinstance(error, StartError) else 1


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
