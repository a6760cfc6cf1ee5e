"""What parts of a request look like on devices."""

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
