"""Blocks that requests are computing, or fetching, and that others with the same beginning had better wait for."""

from collections.abc import Mapping, Sequence

from hex_llm.engine.block_pool import BlockKey
from hex_llm.engine.request import Request


class Making:
    """Only of requests that go from one engine to another: what they share is computed once and sent once."""

    def __init__(self) -> None:
        self._maker: dict[BlockKey, str] = {}
        self._keys: dict[str, list[BlockKey]] = {}

    def has(self, request: Request, keys: Sequence[BlockKey]) -> bool:
        """Whether the first block that a request lacks is on its way for another."""
        return bool(keys) and _counts(request) and keys[0] in self._maker

    def begin(self, request: Request, keys: Sequence[BlockKey]) -> None:
        """A request begins with blocks that nobody has."""
        if _counts(request):
            mine = self._keys[request.id] = [key for key in keys if key not in self._maker]
            self._maker.update(dict.fromkeys(mine, request.id))

    def end(self, request: Request) -> None:
        """It has them, or will not have them."""
        for key in self._keys.pop(request.id, ()):
            del self._maker[key]

    def check(self, running: Mapping[str, Request]) -> None:
        assert self._keys.keys() <= running.keys(), "blocks are waited for that nobody makes"
        assert sorted(key for keys in self._keys.values() for key in keys) == sorted(self._maker)


def _counts(request: Request) -> bool:
    return request.hands_over or bool(request.source)
