"""The adapters that requests name: where each lies, what it is, and whether it can be served at all.

An engine hears of an adapter only after it was fetched and looked at here. So whoever asks for one that is of no use is
told at once, and nobody else waits for it.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from hex_llm.config import Config
from hex_llm.errors import AdapterError, ConfigError, Overloaded, RequestError, ServerError
from hex_llm.lora.adapter import Modules, open_adapter
from hex_llm.lora.store import Store
from hex_llm.server.background import in_background

AT_A_TIME = 8  # adapters that are fetched
_MOST_KNOWN = 1024
_MOST_CALLERS = 1024
_WINDOW_S = 60.0
_MOST_FAILED = 10  # in that time, of one caller; several HTTP processes share them


class Adapter(NamedTuple):
    """What an engine knows an adapter by, and where it finds it."""

    identity: str = ""
    source: str = ""


NO_ADAPTER = Adapter()


class Adapters:
    """`count` is told how each attempt to load one ended: "loaded", or the code of the error."""

    def __init__(
        self, config: Config, store: Store, modules: Modules, count: Callable[[str], None], *, fresh_s: float = 5.0
    ):
        """An adapter is taken to be what it was for `fresh_s`; then its source is asked again."""
        self._sources = config.adapter_sources
        self._store = store
        self._modules = modules
        self._max_rank = config.max_lora_rank
        self._count = count
        self._fresh_s = fresh_s
        self._known: OrderedDict[str, tuple[str, float]] = OrderedDict()  # by source: its identity, and until when
        self._asking: dict[str, asyncio.Task[str]] = {}
        self._loading: dict[str, asyncio.Task[str]] = {}
        self._room = asyncio.Event()  # set where another may be loaded
        self._room.set()
        self._failures = _Failures(-(-_MOST_FAILED // config.api_server_count))

    async def check_named(self) -> None:
        """Loads all that have names. ConfigError for one that cannot be."""
        await asyncio.gather(*map(self._check, self._sources))

    async def find(self, name: str, caller: str) -> Adapter:
        """The adapter of a name, or of a source. What it raises is for the client, and says which one it was."""
        source = self._sources.get(name, name)
        try:
            return Adapter(await self._identify(source, caller), source)
        except (RequestError, ServerError) as error:
            # Another one: it is raised to everybody who has waited, and says more from here on.
            prefix = f"The adapter {name[:100]!a} cannot be served: " if isinstance(error, AdapterError) else ""
            raise type(error)(f"{prefix}{error}") from None

    async def _check(self, name: str) -> None:
        source = self._sources[name]
        try:
            await self._identify(source, "")
        except (RequestError, ServerError) as error:
            raise ConfigError(f"--lora_modules: {name}={source} cannot be served: {error}") from None

    async def _identify(self, source: str, caller: str) -> str:
        identity, until = self._known.get(source, ("", 0.0))
        if time.monotonic() < until:
            return identity
        if identity:
            if source not in self._asking:
                self._start(self._asking, source, self._store.identify)
            if identity == await asyncio.shield(self._asking[source]):
                self._remember(source, identity)
                return identity
        return await self._load(source, caller)

    async def _load(self, source: str, caller: str) -> str:
        while source not in self._loading:
            self._failures.check(caller)
            if self._room.is_set():
                self._begin(source)
            else:
                await self._room.wait()  # who leaves meanwhile leaves nothing behind
        try:
            return await asyncio.shield(self._loading[source])
        except (RequestError, ServerError):
            self._failures.count(caller)
            raise

    def _begin(self, source: str) -> None:
        self._start(self._loading, source, self._read)
        self._loading[source].add_done_callback(partial(self._loaded, source))
        if len(self._loading) == AT_A_TIME:
            self._room.clear()

    def _read(self, source: str) -> str:
        """In a thread of its own."""
        with self._store.fetch(source) as fetched:
            try:
                # One after the other: all of them together may be gigabytes.
                for pair in open_adapter(fetched.folder, self._modules, self._max_rank).pairs.values():
                    pair.read()
            except AdapterError as error:
                self._store.refuse(fetched.identity, error)
                raise
            return fetched.identity

    @staticmethod
    def _start(tasks: dict[str, asyncio.Task[str]], source: str, work: Callable[[str], str]) -> None:
        """Work for all who ask for a source, which goes on when they leave: a thread cannot be stopped."""
        tasks[source] = asyncio.create_task(in_background(lambda: work(source)))
        tasks[source].add_done_callback(lambda _: tasks.pop(source))

    def _loaded(self, source: str, task: asyncio.Task[str]) -> None:
        self._room.set()
        if task.cancelled():  # the server ends
            return
        if error := task.exception():  # which counts as heard now, even where nobody is left to hear it
            self._count(getattr(error, "code", "internal_error"))
        else:
            self._remember(source, task.result())
            self._count("loaded")

    def _remember(self, source: str, identity: str) -> None:
        self._known[source] = identity, time.monotonic() + self._fresh_s
        self._known.move_to_end(source)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)


class _Failures:
    """Who has asked for as many as `most` in a minute that could not be loaded has to wait with the next: each may be a
    download.
    """

    def __init__(self, most: int):
        self._most = most
        self._times: OrderedDict[str, deque[float]] = OrderedDict()  # by caller, the last of them

    def check(self, caller: str) -> None:
        times = self._times.get(caller, deque[float]())
        if len(times) == self._most and (left := times[0] + _WINDOW_S - time.monotonic()) > 0:
            raise Overloaded(
                f"{self._most} adapters that were asked for within a minute could not be served, which is the most"
                f" there may be. No other is looked at for {left:.0f} s."
            )

    def count(self, caller: str) -> None:
        self._times.setdefault(caller, deque(maxlen=self._most)).append(time.monotonic())
        self._times.move_to_end(caller)
        if len(self._times) > _MOST_CALLERS:
            self._times.popitem(last=False)
