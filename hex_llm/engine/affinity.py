"""Which prefixes an engine is believed to have cached, as its router sees it from outside."""

from collections import OrderedDict
from collections.abc import Sequence

from hex_llm.engine.block_pool import BlockKey


class Belief:
    """The keys of the blocks that an engine has most lately been given to compute, no more than it has memory for.

    It may be wrong either way: others use the engine too, and it may have needed the memory for what it runs.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first keys are there, in a row."""
        known = self._keys
        for count, key in enumerate(keys):
            if key not in known:
                return count
        return len(keys)

    def enter(self, keys: Sequence[BlockKey]) -> None:
        """The end of a prefix is forgotten first, as in the engine: without its beginning it is of no use."""
        known = self._keys
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._capacity:
            known.popitem(last=False)
