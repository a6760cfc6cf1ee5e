"""The server as its handlers see it: settings, the engine, the text side, and whether requests are taken."""

import enum
import itertools
import time
from collections.abc import Collection

from hex_llm.config import Config
from hex_llm.engine.limits import Limits
from hex_llm.engine.router import Router
from hex_llm.engine.wire import Ready
from hex_llm.errors import EngineDead, ModelNotFound, RequestError, Unavailable
from hex_llm.server.adapters import NO_ADAPTER, Adapter, Adapters
from hex_llm.server.admission import Admission
from hex_llm.server.exchange import Exchange
from hex_llm.server.keys import Keys
from hex_llm.server.metrics import Metrics
from hex_llm.text.client import TextClient
from hex_llm.text.tokenizer import Tokenizer


class Phase(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Server:
    """One HTTP process. `tokenizer`, `text`, `limits` and `ready`, what the engine said of itself, are there from the
    moment it is ready; so are `adapters`, with --enable_lora.

    `open` are the requests that have no answer yet, or not all of it; `connections` those of clients, idle ones too;
    `roles` what each engine is for, empty where all do all.
    """

    tokenizer: Tokenizer
    text: TextClient
    limits: Limits
    ready: Ready
    adapters: Adapters

    def __init__(self, config: Config, engine: Router, keys: Keys, *, index: int = 0):
        self.config = config
        self.engine = engine
        self.keys = keys
        self.names = config.served_names
        self.roles = tuple(config.role(index) for index in range(config.num_engines))
        self.metrics = Metrics(self.names[0], self.roles, config.num_adapters)
        engine.on_step = self.metrics.count_step
        engine.on_send = self.metrics.count_sent
        self.phase = Phase.STARTING
        self.started = time.time()
        shares = config.api_server_count
        sequences = config.num_engines * config.max_decode_seqs + config.max_queued_requests
        self.admission = Admission(-(-sequences // shares), -(-config.max_queued_tokens // shares))
        self._index = index
        self._ids = itertools.count()
        self._seeds = itertools.count(config.seed + (index << 40))
        self.loop_lag = 0.0
        self.open: set[Exchange] = set()
        self.connections: Collection[object] = ()

    def check_ready(self) -> None:
        """Raises what a request is refused with while there is nobody to serve it."""
        match self.phase:
            case Phase.STARTING:
                raise Unavailable("The server is starting; /ping tells how far it is.", code="starting")
            case Phase.DRAINING:
                raise Unavailable("The server is shutting down and takes no new requests.", code="draining")
            case Phase.DEAD:
                raise EngineDead("The engine has stopped; the server is about to end.")

    def check_model(self, name: str | None) -> None:
        """An empty name, as Vertex's notebooks send it, is as good as none."""
        names = (*self.names, *self.config.adapter_sources)
        if name and name not in names:
            raise ModelNotFound(
                f"There is no model {name[:100]!r} here; this server has {', '.join(names)}.", param="model"
            )

    async def find_adapter(self, name: str | None, exchange: Exchange) -> Adapter:
        return await self.adapters.find(name, exchange.key_id or exchange.client) if name else NO_ADAPTER

    @property
    def num_open(self) -> int:
        return len(self.open)

    def fail_all(self, error: Exception) -> None:
        """Has every request that is open end with this error, however far it has come."""
        for exchange in list(self.open):
            exchange.fail(error)

    def new_id(self) -> str:
        return f"{self._index}-{next(self._ids)}"

    def new_seed(self) -> int:
        """For a request that brings none."""
        return next(self._seeds)

    def salt(self, key_id: str | None, cache_salt: str | None) -> str:
        """Whose prefixes a request may find."""
        isolation = self.config.prefix_cache_isolation
        if isolation == "salt" and cache_salt is None:
            raise RequestError("cache_salt is missing; this server wants it of every request.", param="cache_salt")
        by_key = isolation == "key" or (isolation == "auto" and len(self.keys) > 1)
        return f"{key_id if by_key else ''}\n{cache_salt or ''}" if by_key or cache_salt else ""

    def gauges(self) -> dict[str, tuple[str, float]]:
        """What is true of this process at the moment."""
        silent = max(self.engine.silence(each.index)[0] for each in self.engine.replicas)
        return {
            "ready": ("1 where requests are taken.", self.phase == Phase.READY),
            "draining": ("1 where requests under way are finished before the end.", self.phase == Phase.DRAINING),
            "admitted_sequences": ("Sequences under way in this process.", self.admission.sequences),
            "open_connections": ("Connections of clients to this process.", len(self.connections)),
            "queue_tokens": ("Tokens of prompts under way in this process.", self.admission.tokens),
            "engine_last_step_age_seconds": (
                "Seconds since the engine was last heard of; of several, the most silent one.",
                silent,
            ),
            "event_loop_lag_seconds": (
                "Seconds that the event loop of this process was late, at the last look.",
                self.loop_lag,
            ),
        }
