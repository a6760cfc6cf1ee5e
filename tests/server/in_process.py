"""The HTTP side of a server in this process, with an engine that is a fake, and no text side to speak of."""

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import uvloop

from hex_llm.config import Config
from hex_llm.engine.request import Request
from hex_llm.engine.router import Router
from hex_llm.lora.store import Fetched, Store
from hex_llm.server.adapters import Adapters
from hex_llm.server.app import make_app
from hex_llm.server.http_server import HttpServer
from hex_llm.server.keys import Keys
from hex_llm.server.state import Phase, Server
from hex_llm.text.client import TextClient
from hex_llm.text.tokenizer import Tokenizer
from tests.engine.fake_carrier import FakeCarrier, source_of
from tests.engine.fake_replicas import connected
from tests.lora.adapters import MODULES

_STEP_S = 0.002


class WatchedStore(Store):
    """Counts what is asked of it. A source has an error where a test wants it to, and `gate` holds all that is fetched
    back while it is not set.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.errors: dict[str, Exception] = {}
        self.num_identified: Counter[str] = Counter()
        self.num_fetched: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.num_at_once = self.most_at_once = 0
        self._counting = threading.Lock()

    def identify(self, source: str) -> str:
        self.num_identified[source] += 1
        return super().identify(source)

    def fetch(self, source: str, identity: str | None = None) -> Fetched:
        with self._counting:
            self.num_fetched[source] += 1
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            assert self.gate.wait(20)
            if error := self.errors.get(source):
                raise error
            return super().fetch(source, identity)
        finally:
            with self._counting:
                self.num_at_once -= 1


class AnyCarrier(FakeCarrier):
    """Brings an adapter from wherever it lies."""

    def fetch(self, identity: str, source: str) -> None:
        super().fetch(identity, source_of(identity))


class WordsAsNumbers:
    """A text side for which every prompt is the same."""

    async def encode(self, text: str) -> list[int]:
        return [5, 6, 7]

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return [8, 9, 10]


class Front:
    """What a test sees of it."""

    def __init__(self, config: Config, tokenizer: Path, store: WatchedStore, keys: Sequence[str]):
        self.config = config
        self.store = store
        self.carrier = AnyCarrier()
        self.loop = uvloop.new_event_loop()
        self.client = httpx.Client()
        self.key = keys[0] if keys else None
        self._tokenizer = tokenizer
        self._keys = ",".join(keys) or None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self.loop.run_until_complete(self._live()))
        self._thread.start()
        assert self._ready.wait(20)

    async def _live(self) -> None:
        config, router = self.config, Router(1)
        num_adapters = config.max_num_mem_cached_lora if config.enable_lora else 0
        carrier = self.carrier if config.enable_lora else None
        (self.replica,) = connected(router, num_adapters=num_adapters, carrier=carrier)
        self.server = server = Server(config, router, Keys(None, self._keys))
        server.tokenizer = Tokenizer.load(self._tokenizer)
        server.text = cast(TextClient, WordsAsNumbers())
        server.limits = self.replica.engine.limits
        if config.enable_lora:
            server.adapters = Adapters(config, self.store, MODULES, server.metrics.count_lora_load, fresh_s=0.2)
        server.phase = Phase.READY
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._stop = asyncio.Event()
        http = HttpServer(make_app(server), config)
        task = asyncio.create_task(http.serve(sockets=[listener]))
        self._ready.set()
        while not self._stop.is_set():
            self.replica.step()
            self.replica.live()
            await asyncio.sleep(_STEP_S)
        http.should_exit = http.force_exit = True
        await task

    def stop(self) -> None:
        self.store.gate.set()
        self.client.close()
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def post(self, path: str, body: object, *, key: str | None = None, timeout: float = 20) -> httpx.Response:
        """With the first of the keys, if none is given."""
        sent = key or self.key
        headers = {"Authorization": f"Bearer {sent}"} if sent else {}
        return self.client.post(self.url + path, json=body, headers=headers, timeout=timeout)

    def get(self, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return self.client.get(self.url + path, headers=headers)

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics").text.splitlines()
        samples = (line.rpartition(" ") for line in lines if line.startswith("hexllm:"))
        return {name.removeprefix("hexllm:"): float(value) for name, _, value in samples}

    @property
    def requests(self) -> list[Request]:
        """All that the engine was ever given."""
        return [each.request for each in self.replica.added]


@contextlib.contextmanager
def running_front(config: Config, tokenizer: Path, store: WatchedStore, keys: Sequence[str] = ()) -> Iterator[Front]:
    server = Front(config, tokenizer, store, keys)
    try:
        yield server
    finally:
        server.stop()
