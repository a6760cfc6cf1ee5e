"""Copies of blocks on their way between the KV caches of two engines.

Such a copy is one array that means the same to engines on any number of devices: each of the model's heads once, in the
model's order. Where devices share the heads evenly each has its own of the copy too; where a device has a head that
others also have, or one that fills up, each has the whole copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec, Sharding

from hex_llm.kernels.paged_attention.pages import Pages, packed, unpacked
from hex_llm.models.split import Split
from hex_llm.parallel.manual import device_index, join_over_devices
from hex_llm.parallel.sharding import STAGED, WHOLE

# Large enough for a link to carry at its full rate, small enough for a few of them to lie in memory beside the cache.
LARGEST_BYTES = 64 * 2**20
MOST_BLOCKS = 256
_GROWTH = 4  # from one number of blocks to the next
_HEADS = 3  # the dimension of a copy that devices share


@dataclass(frozen=True, slots=True)
class Staging:
    """What copies of blocks look like: [layers, blocks, 2, heads, page size, page width], with pages packed."""

    counts: tuple[int, ...]  # the numbers of blocks that a copy can have, from few to many
    block: tuple[int, int, int, int, int]  # the other dimensions
    dtype: Any
    sharding: Sharding  # for `jax.device_put`

    def count(self, num_blocks: int) -> int:
        """The smallest that holds so many."""
        return next(count for count in self.counts if count >= num_blocks)

    def shape(self, count: int) -> tuple[int, ...]:
        layers, *page = self.block
        return (layers, count, *page)


def part_counts(block_bytes: int, sequence_blocks: int) -> tuple[int, ...]:
    """Numbers of blocks for which copying is compiled, where the longest sequence has `sequence_blocks`."""
    most = min(MOST_BLOCKS, LARGEST_BYTES // block_bytes)
    counts = [1]
    while counts[-1] < sequence_blocks and counts[-1] * _GROWTH <= most:
        counts.append(counts[-1] * _GROWTH)
    return tuple(counts)


def staged_spec(split: Split) -> PartitionSpec:
    return STAGED if _is_even(split) else WHOLE


def places_to_read(blocks: Sequence[int], count: int, num_pages: int) -> np.ndarray:
    """Where a copy's pages are; those that fill it up are page 0."""
    places = np.zeros(count, np.int32)
    places[: len(blocks)] = blocks
    # JAX clamps or drops an index out of range without a word.
    assert 0 <= places.min() <= places.max() < num_pages, "pages"
    return places


def places_to_write(blocks: Sequence[int], count: int, num_pages: int) -> np.ndarray:
    """Where a copy's pages go. What fills it up, or has no block any more, goes to places of its own beyond the last
    page, and is dropped there: the program is promised that no two go to the same one."""
    places = places_to_read(blocks, count, num_pages)
    nowhere = num_pages + np.arange(count, dtype=np.int32)
    places = np.where(places == 0, nowhere, places)
    assert len(np.unique(places)) == count, "two pages would go to one place"
    return places


def copy_out(kv: tuple[Pages, ...], places: Array, *, split: Split) -> Array:
    def copied(pages: Array) -> Array:
        return pages.at[places].get(mode="promise_in_bounds")

    staged = jnp.stack([packed(jax.tree.map(copied, pages)) for pages in kv])
    return staged if _is_even(split) else _whole(staged, split)


def copy_in(kv: tuple[Pages, ...], staged: Array, places: Array, *, split: Split) -> tuple[Pages, ...]:
    own = staged if _is_even(split) else _own(staged, split)

    def written(pages: Array, part: Array) -> Array:
        return pages.at[places].set(part, mode="drop", unique_indices=True)

    return tuple(jax.tree.map(written, pages, unpacked(part)) for pages, part in zip(kv, own, strict=True))


def _is_even(split: Split) -> bool:
    return split.arch.num_kv_heads % split.num_devices == 0


def _whole(staged: Array, split: Split) -> Array:
    """All of the model's heads, of what the devices have."""
    heads, copies = split.arch.num_kv_heads, split.copies
    if heads * copies == split.num_devices:  # as many devices as there are heads can do it among themselves
        groups = [list(range(first, split.num_devices, copies)) for first in range(copies)]
        return join_over_devices(staged, axis=_HEADS, groups=groups)
    return join_over_devices(staged, axis=_HEADS)[:, :, :, : heads * copies : copies]


def _own(staged: Array, split: Split) -> Array:
    """What a device has of the model's heads; zeros where it has none."""
    head = (device_index() * split.kv_heads + jnp.arange(split.kv_heads, dtype=jnp.int32)) // split.copies
    return jnp.take(staged, head, axis=_HEADS, mode="fill", fill_value=0)
