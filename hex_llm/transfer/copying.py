"""Parts between devices and the host's memory, where a part is its blocks one after another in each layer.

A device's own engine copies ten times as fast as a thread does, and to memory that is pinned only; threads, side by
side, do the rest. docs/performance.md has the rates.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.transfer.staging import Staging

_PIECES = 4  # of a part, that are copied side by side
_PINNED = "pinned_host"


def to_host(pages: jax.Array, first: int, count: int, into: memoryview) -> None:
    """Writes `count` blocks from the `first` on, when they are there."""
    # As whole numbers: numpy copies types that it does not know, such as bfloat16, one by one.
    plain = np.dtype(f"u{pages.dtype.itemsize}")
    layers, _, *page = pages.shape
    blocks = np.frombuffer(into, plain).reshape(layers, count, *page)
    if not _is_host(pages.sharding):
        pages = jax.device_put(pages, pages.sharding.with_memory_kind(_PINNED))
    for shard in pages.addressable_shards:
        if shard.replica_id == 0:
            _copy(np.asarray(shard.data).view(plain)[:, first : first + count], blocks[shard.index])


def to_device(memory: memoryview, count: int, staging: Staging, released: Callable[[], object]) -> jax.Array:
    """A part on the device. `released` is called, from any thread, when nobody reads the memory any more."""
    layers, *page = staging.block
    plain = np.dtype(f"u{np.dtype(staging.dtype).itemsize}")
    # Whatever JAX makes of it refers to this very array, since views of views refer to what they are views of.
    root = np.frombuffer(memory, plain)
    blocks = root.reshape(layers, count, *page)
    padded = staging.count(count)
    if padded > count:
        filled = np.zeros(staging.shape(padded), plain)
        _copy(blocks, filled[:, :count])
        blocks = filled
    pages = _put(blocks.view(staging.dtype), staging)
    if padded == count and _is_host(staging.sharding):
        # A CPU's array may be the very memory that it was made from. JAX drops that when it is next called, or when
        # garbage is collected.
        weakref.finalize(root, released).atexit = False
    else:
        jax.block_until_ready(pages)
        released()
    return pages


def prepare(staging: Staging) -> None:
    """Does all of it once for every size of a part, so that nothing is compiled when one comes."""
    for count in staging.counts:
        host = np.zeros(staging.shape(count), staging.dtype)
        data = memoryview(host.view(np.uint8).reshape(-1))
        to_host(to_device(data, count, staging, lambda: None), 0, count, data)


def _is_host(sharding: jax.sharding.Sharding) -> bool:
    """Whether its devices are the host's own processors."""
    return next(iter(sharding.device_set)).platform == "cpu"


def _put(blocks: np.ndarray, staging: Staging) -> jax.Array:
    pieces = [] if _is_host(staging.sharding) else _pieces(len(blocks))
    if len(pieces) < 2:
        return jax.device_put(blocks, staging.sharding)
    # Each waits for its own: else the copies would be made one after the other, by JAX's thread.
    put = _threads().map(lambda piece: jax.block_until_ready(jax.device_put(blocks[piece], staging.sharding)), pieces)
    return _joined(*put)


@jax.jit
def _joined(*pieces: jax.Array) -> jax.Array:
    return jnp.concatenate(pieces)


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Layers side by side; numpy lets other threads run meanwhile."""
    list(_threads().map(lambda piece: np.copyto(target[piece], source[piece]), _pieces(len(source))))


def _pieces(num_layers: int) -> Sequence[slice]:
    ends = [num_layers * number // _PIECES for number in range(_PIECES + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends) if start < stop]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_PIECES, os.cpu_count() or 1), thread_name_prefix="copy blocks")
