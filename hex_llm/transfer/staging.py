"""Parts between a device and the host's memory, where a part is its blocks one after another in each layer."""

import math
from typing import Any, Protocol

import jax
import numpy as np

from hex_llm.transfer.words import Layout


class Staging(Protocol):
    """What parts look like on the devices of an engine: [layers, blocks, ...], of one of several numbers of blocks."""

    @property
    def counts(self) -> tuple[int, ...]: ...

    @property
    def block(self) -> tuple[int, ...]:
        """The dimensions but for that of the blocks."""
        ...

    @property
    def dtype(self) -> Any: ...

    @property
    def sharding(self) -> jax.sharding.Sharding: ...

    def count(self, num_blocks: int) -> int:
        """The smallest of the counts that holds so many."""
        ...

    def shape(self, count: int) -> tuple[int, ...]: ...


def layout_of(staging: Staging) -> Layout:
    return Layout(tuple(staging.block), np.dtype(staging.dtype).name, max(staging.counts))


def num_bytes(staging: Staging, count: int) -> int:
    """Of so many blocks, without what fills up a part."""
    return math.prod(staging.block) * count * np.dtype(staging.dtype).itemsize


def to_host(pages: jax.Array, count: int, into: memoryview) -> None:
    """Writes the first `count` blocks, when they are there."""
    # As whole numbers: numpy copies types that it does not know, such as bfloat16, one by one.
    plain = np.dtype(f"u{pages.dtype.itemsize}")
    layers, _, *page = pages.shape
    blocks = np.frombuffer(into, plain).reshape(layers, count, *page)
    shards = [shard for shard in pages.addressable_shards if shard.replica_id == 0]
    for shard in shards:
        shard.data.copy_to_host_async()
    for shard in shards:
        blocks[shard.index] = np.asarray(shard.data).view(plain)[:, :count]


def to_device(memory: memoryview, count: int, staging: Staging) -> jax.Array:
    """A part on the device, when it is there: nobody reads the memory any more."""
    layers, *page = staging.block
    plain = np.dtype(f"u{np.dtype(staging.dtype).itemsize}")
    blocks = np.frombuffer(memory, plain).reshape(layers, count, *page)
    padded = staging.count(count)
    # A CPU's arrays may be the very memory that they are made from.
    if padded > count or next(iter(staging.sharding.device_set)).platform == "cpu":
        filled = np.zeros(staging.shape(padded), plain)
        filled[:, :count] = blocks
        blocks = filled
    return jax.block_until_ready(jax.device_put(blocks.view(staging.dtype), staging.sharding))
