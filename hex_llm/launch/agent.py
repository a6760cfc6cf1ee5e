"""A host other than 0: it starts the processes that host 0 wants, and ends when host 0 does."""

import logging
import os
import queue
import signal
import sys
import time
from importlib.metadata import version

from hex_llm import channel
from hex_llm.channel import Channel
from hex_llm.config import Config
from hex_llm.errors import ConfigError, StartError
from hex_llm.frames import Broken
from hex_llm.launch.addresses import Place
from hex_llm.launch.agent_wire import End, Exited, HostHello, Start, Stop, ToAgent
from hex_llm.launch.agents import GATHER_S
from hex_llm.launch.local import LocalChild, start_engine
from hex_llm.launch.local_devices import local_devices
from hex_llm.peer import Peer
from hex_llm.process import CLUSTER_KEY, ENGINE_DIED, release_signals

logger = logging.getLogger(__name__)

_POLL_S = 0.1


def hello_of(config: Config, rank: int, address: str) -> HostHello:
    """What a host says of itself."""
    devices = local_devices(os.environ)
    return HostHello(rank, address, config, devices.platform, len(devices), _versions())


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("hex-llm", "jax"))


def run_agent(config: Config, place: Place, key: bytes) -> int:
    """Serves host 0 until it ends; returns the exit code."""
    logger.info("This is host %d of %d; host 0 is at %s.", place.rank, place.num_hosts, place.coordinator)
    found = _call(place, key)
    found.send(hello_of(config, place.rank, found.socket.getsockname()[0]))
    return _Agent(config, place, key).run(found)


class _Lost(Exception):
    """Host 0 is gone."""


class _Agent:
    def __init__(self, config: Config, place: Place, key: bytes):
        self._place = place
        self._environment = {CLUSTER_KEY: key.decode()}
        self._patience = config.drain_timeout_s
        self._inbox: queue.SimpleQueue[ToAgent | _Lost] = queue.SimpleQueue()
        self._children: dict[int, LocalChild] = {}
        self._end_at: float | None = None

    def run(self, found: Channel) -> int:
        peer: Peer[ToAgent] = Peer(
            found, Start | End | Stop, take=self._inbox.put, lost=lambda why: self._inbox.put(_Lost(why))
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._told)
        release_signals()
        try:
            return self._serve(peer)
        finally:
            for child in self._children.values():
                child.end()
            peer.close()

    def _told(self, number: int, frame: object) -> None:
        """Host 0 is most likely told, too, and has requests to finish; a second signal ends this one at once."""
        now = time.monotonic()
        self._end_at = now if self._end_at is not None else now + self._patience
        logger.info("Told to stop: waiting for host 0 to end, for at most %g s.", self._end_at - now)

    def _serve(self, peer: Peer[ToAgent]) -> int:
        while self._end_at is None or time.monotonic() < self._end_at:
            try:
                message = self._inbox.get(timeout=_POLL_S)
            except queue.Empty:
                message = None
            match message:
                case Start(number, task, environment):
                    self._children[number] = start_engine(task, environment | self._environment)
                case End(number):
                    if child := self._children.get(number):
                        child.end()
                case Stop(reason):
                    if reason:
                        raise ConfigError(reason)
                    logger.info("Host 0 has ended; this host ends, too.")
                    return 0
                case _Lost():
                    _say(f"host 0 at {peer.address} is lost: {message}.")
                    return ENGINE_DIED
            for number, child in list(self._children.items()):
                if (code := child.poll()) is not None:
                    del self._children[number]
                    peer.send(Exited(number, code))
        return 0


def _call(place: Place, key: bytes) -> Channel:
    try:
        return channel.keep_calling(f"tcp:{place.coordinator}", key, GATHER_S)
    except Broken as error:
        raise ConfigError(
            f"Host 0 at {place.coordinator} does not let this host in; HEXLLM_CLUSTER_KEY may be another there: {error}"
        ) from None
    except OSError as error:
        raise StartError(f"Host 0 cannot be reached at {place.coordinator} for {GATHER_S:g} s: {error}.") from None


def _say(text: str) -> None:
    print(f"hex-llm: {text}", file=sys.stderr, flush=True)
