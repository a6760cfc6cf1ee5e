"""Servers with engines of two kinds, what they have counted, and whether anything is left of requests that ended."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.server.replicas import sample
from tests.server.servers import RunningServer, checked, running_server

_NEWS_S = 0.4  # after which engines have told all that they had counted before
_OF_TWO_KINDS = ('kv_blocks{state="held"}', "num_requests_waiting_for_kv")
_BUSY = ("requests_in_flight", 'kv_blocks{state="used"}', *_OF_TWO_KINDS)


@dataclass(frozen=True, slots=True)
class Counts:
    """Of all engines together."""

    steps: float
    queries: float  # tokens of prompts that were looked up in the prefix cache
    hits: float
    transfers: float = 0
    num_bytes: float = 0
    lost: float = 0  # transfers

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(getattr(self, name) - getattr(before, name) for name in self.__slots__))


@contextlib.contextmanager
def checked_server(folder: Path | None, log: Path, *flags: str, devices: int) -> Iterator[RunningServer]:
    """One whose engines look whenever they are idle whether they have lost anything."""
    environment = checked() | {"JAX_NUM_CPU_DEVICES": str(devices)}
    with running_server(folder, log, *flags, small=False, **environment) as server:
        yield server


def settled(server: RunningServer, *, plain: bool = False) -> Counts:
    """What engines have counted once they are at rest, with nothing left on any of them."""
    time.sleep(_NEWS_S)
    busy = [name for name in _BUSY if not (plain and name in _OF_TWO_KINDS)]
    deadline = time.monotonic() + 10
    while left := {name: value for name in busy if (value := sample(server, name))}:
        assert time.monotonic() < deadline, f"something is left: {left}"
        time.sleep(0.1)
    assert sample(server, "invariant_violations_total") == 0, server.log.read_text()[-4000:]
    assert sample(server, "xla_compiles_after_ready_total") == 0
    assert sample(server, "internal_errors_total") == 0
    names = ["engine_steps", "prefix_cache_queries", "prefix_cache_hits"]
    names += [] if plain else ["kv_transfers", "kv_transfer_bytes", "kv_transfer_failures"]
    return Counts(*(sample(server, f"{name}_total") for name in names))
