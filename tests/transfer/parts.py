"""Parts for the tests, and an engine's end of a Porter."""

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from hex_llm.engine.handover import FromPorter, Part
from hex_llm.transfer.porter import DevicePorter

KEY = b"the cluster's key"


@dataclass(frozen=True)
class SmallStaging:
    """As the runner's."""

    sharding: Sharding
    counts: tuple[int, ...] = (1, 4, 8)
    block: tuple[int, ...] = (2, 2, 4, 8, 16)
    dtype: Any = jnp.bfloat16

    def count(self, num_blocks: int) -> int:
        return next(count for count in self.counts if count >= num_blocks)

    def shape(self, count: int) -> tuple[int, ...]:
        layers, *page = self.block
        return (layers, count, *page)


def staging(**fields: Any) -> SmallStaging:
    return SmallStaging(SingleDeviceSharding(jax.devices()[0]), **fields)


def content(like: Any, request_id: str, first: int, count: int) -> np.ndarray:
    """What blocks of a request hold: every block of every request something of its own."""
    layers, *page = like.block
    blocks = []
    for block in range(first, first + count):
        seed = sum(map(ord, request_id)) * 1000 + block
        blocks.append(np.random.default_rng(seed).integers(0, 250, (layers, 1, *page)))
    return np.concatenate(blocks, axis=1).astype(like.dtype)


def make_part(like: Any, request_id: str, first: int, count: int) -> Part:
    """As `copy_out` gives it: padded, on the device, nobody else's."""
    padded = np.full(like.shape(like.count(count)), 99, like.dtype)
    padded[:, :count] = content(like, request_id, first, count)
    return Part(request_id, first, count, jax.device_put(padded, like.sharding) + 0)


def is_right(like: Any, part: Part) -> bool:
    held = np.asarray(part.pages)
    assert held.shape == like.shape(like.count(part.count))
    assert part.pages.sharding == like.sharding
    return bool((held[:, : part.count] == content(like, part.request_id, part.first, part.count)).all())


class End:
    """An engine's end: a Porter, and what it has said."""

    def __init__(self, address: str, like: Any = None, *, key: bytes = KEY, **settings: Any):
        self.staging = like or staging()
        self.told: queue.SimpleQueue[FromPorter] = queue.SimpleQueue()
        self.porter = DevicePorter(address, key, self.staging, self.told.put, **settings)

    @property
    def address(self) -> str:
        return self.porter.address

    def next(self, kind: type | None = None, timeout: float = 10.0) -> Any:
        word = self.told.get(timeout=timeout)
        assert kind is None or isinstance(word, kind), word
        return word

    def says_nothing(self, seconds: float = 0.1) -> bool:
        time.sleep(seconds)
        return self.told.empty()

    def send(self, request_id: str, first: int, count: int) -> None:
        self.porter.send(make_part(self.staging, request_id, first, count))

    def take(self, part: Part) -> None:
        assert is_right(self.staging, part)
        self.porter.took(part)

    @property
    def num_held(self) -> int:
        """All that is not as if nothing had ever happened."""
        giving, fetching = self.porter._giving, self.porter._fetching
        with giving._lock, fetching._changed:
            return (
                sum(asker.num_staged + len(asker.requests) for asker in giving._askers)
                + len(giving._given)
                + giving._lingering
                + len(fetching._fetches)
                + len(fetching._numbers)
            )


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come to that"
        time.sleep(0.005)
