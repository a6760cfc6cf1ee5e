"""The ring of shared memory through which a block on Hopper gets its tiles of a weight in few bits, and its tokens."""

from typing import Any, NamedTuple

from jax import Array, lax


class Ring(NamedTuple):
    """Filled by the memory warpgroup, and emptied by those that multiply."""

    slots: int
    x: Any  # [slots, tokens, depth]
    codes: Any  # [slots, rows / 64, lines, 128] int32
    scale: Any  # [slots, rows / 64, words, 64] int32; None: there is one for each row, elsewhere
    full: Any  # a barrier for each slot
    empty: Any  # likewise

    def after(self, slot: Array) -> Array:
        return lax.select(slot == self.slots - 1, 0, slot + 1)

    def before(self, slot: Array) -> Array:
        return lax.select(slot == 0, self.slots - 1, slot - 1)


class Run(NamedTuple):
    """Tiles of a row of them, side by side."""

    first: Array
    length: Array | int


class Share(NamedTuple):
    """What a warpgroup multiplies of a slot: of `stack` groups of tiles one below the other, one of each."""

    worker: Array
    workers: int
    stack: int

    def tile(self, i: int) -> Any:
        """The place in a slot of its i-th."""
        return i * self.workers + self.worker
