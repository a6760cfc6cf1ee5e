"""Fixed-size blocks of KV cache: who owns them, and what they remember.

A block is in exactly one of four states:

    owned      references > 0
    retired    references == 0, and a step under way may still touch it: it is not given out yet
    cached     references == 0, and still holds a prefix that a new request can adopt
    empty      references == 0, holds nothing

Cached and empty blocks are both free: they wait in one queue, least recently used first, and an allocation takes
from its head. A cached block thus lives until its memory is wanted. Owned and retired blocks may hold a prefix too.

A block is known by its key, a digest of its tokens and of all tokens before them.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from hex_llm.engine.request import Request

BlockKey = bytes


def extend_keys(request: Request, count: int, block_size: int) -> list[BlockKey]:
    """The keys of the first `count` blocks of a request, all of them full; each is computed once."""
    keys = request.keys
    if len(keys) < count:
        tokens = array("i", request.tokens(len(keys) * block_size, count * block_size))
        size = block_size * tokens.itemsize
        data = tokens.tobytes()
        key = keys[-1] if keys else _root(request)
        for start in range(0, len(data), size):
            key = hashlib.sha256(key + data[start : start + size]).digest()
            keys.append(key)
    return keys[:count]


def _root(request: Request) -> BlockKey:
    """Keeps apart what must not be shared: equal tokens have other keys and values under another adapter, and in a
    sequence above the rope's switch.
    """
    return hashlib.sha256(repr((request.cache_salt, request.adapter, request.is_long)).encode()).digest()


class BlockPool:
    """The blocks 1 to `num_blocks` - 1. Block 0 is never given out."""

    def __init__(self, num_blocks: int):
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._retired: OrderedDict[int, int] = OrderedDict()  # block -> the step to wait for, in order
        self._references = [0] * num_blocks
        self._key: list[BlockKey | None] = [None] * num_blocks
        self._block: dict[BlockKey, int] = {}

    @property
    def num_blocks(self) -> int:
        """How many blocks can be given out."""
        return len(self._references) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_retired(self) -> int:
        return len(self._retired)

    @property
    def empty(self) -> list[int]:
        """Those that are free and hold nothing, and block 0, which nobody has either."""
        return [0, *(block for block in self._free if self._key[block] is None)]

    @property
    def num_cached(self) -> int:
        return sum(block in self._free for block in self._block.values())

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks off the free queue; the prefixes they held are forgotten."""
        assert count <= len(self._free), "ask num_free first"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._references[block] = 1
        return blocks

    def find(self, keys: Sequence[BlockKey], reach: int | None = None) -> list[int]:
        """The blocks of the longest prefix of `keys` that can be gone on from, which nobody owns by that yet.

        Where a token sees into no more than `reach` blocks before its own, the prefix's last so many have to be
        there, and 0 stands for those before.
        """
        start = end = len(keys)  # those between have been found
        while start > (0 if reach is None else max(end - reach, 0)):
            start -= 1
            if keys[start] not in self._block:
                end = start
        return [0] * start + [self._block[key] for key in keys[start:end]]

    def acquire(self, found: Sequence[int], count: int, *, spare: int) -> list[int] | None:
        """What `find` has just found, and `count` blocks beside. Nothing happens, and None comes back, where that
        would leave fewer than `spare` blocks free.
        """
        adopted = [block for block in found if block]
        if count + spare > len(self._free) - sum(block in self._free for block in adopted):
            return None
        for block in adopted:
            self._references[block] += 1
            self._free.pop(block, None)
            self._retired.pop(block, None)
        return [*found, *self.allocate(count)]

    def release(self, blocks: Sequence[int], after: int) -> None:
        """Drops a reference to each. What nobody refers to any more is free once step `after` has been read.

        The end of a prefix is queued first, so that it is evicted first.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._retired[block] = after

    def reclaim(self, step: int) -> None:
        """Frees what waited for `step`, or for one before it."""
        while self._retired and next(iter(self._retired.values())) <= step:
            block, _ = self._retired.popitem(last=False)
            self._free[block] = None

    def remember(self, block: int, key: BlockKey) -> None:
        """Offers a full block, computed and read, to later requests. Of equal blocks the first is kept."""
        if self._key[block] is None and key not in self._block:
            self._key[block] = key
            self._block[key] = block

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Offers these prefixes no longer."""
        for key in keys:
            if (block := self._block.get(key)) is not None:
                self._forget(block)

    def forget_all(self) -> None:
        """Offers no prefix any longer."""
        self.forget(list(self._block))

    def check(self, owned: Iterable[Sequence[int]]) -> None:
        """Asserts that every block is where it belongs, given what each owner believes to have."""
        references = Counter(block for blocks in owned for block in blocks)
        assert 0 not in references, "somebody owns block 0"
        assert references == +Counter(dict(enumerate(self._references))), "references differ from owners"
        places = [*references, *self._retired, *self._free]
        assert sorted(places) == list(range(1, self.num_blocks + 1)), "a block is lost, or in two states"
        assert list(self._retired.values()) == sorted(self._retired.values()), "blocks retired out of order"
        assert {b: k for b, k in enumerate(self._key) if k} == {b: k for k, b in self._block.items()}

    def _forget(self, block: int) -> None:
        if (key := self._key[block]) is not None:
            self._key[block] = None
            del self._block[key]
