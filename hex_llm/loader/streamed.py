"""A checkpoint whose files are elsewhere, and come one after the other while its weights are loaded."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hex_llm.download.shards import Shards
from hex_llm.loader.checkpoint import Checkpoint, gather
from hex_llm.quantization.method import Tensor
from hex_llm.safetensors_file import LazyTensor, parse_header


@dataclass(frozen=True, slots=True)
class RemoteTensor(LazyTensor):
    """A tensor whose file is here while it is loaded. Before, the rows that are looked at are asked for."""

    shards: Shards

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        if self.path.exists():
            return LazyTensor.__getitem__(self, index)
        count, *others = self.shape or (1,)
        low, high, step = index[0].indices(count) if index else (0, count, 1)
        assert step == 1, "rows are asked for in one piece"
        row = math.prod(others) * self.dtype.itemsize
        content = self.shards.read(self.path.name, self.offset + low * row, self.offset + high * row)
        rows = np.frombuffer(content, self.dtype).reshape(high - low, *others)
        return rows[:, *index[1:]] if self.shape else rows[0]


class StreamedCheckpoint(Checkpoint):
    def __init__(self, shards: Shards, tensors: Mapping[str, Tensor]):
        super().__init__(shards.folder, tensors)
        self._shards = shards

    def under(self, tensors: Mapping[str, Tensor]) -> Checkpoint:
        return StreamedCheckpoint(self._shards, tensors)

    def in_turn(self, needs: Sequence[Collection[str]]) -> Iterator[Sequence[int]]:
        return self._shards.in_turn([{self[name].path.name for name in names} for names in needs])


def open_streamed(shards: Shards) -> Checkpoint:
    """Asks for the header of every file and verifies it, as of a folder."""

    def tensors(name: str) -> list[LazyTensor]:
        path, size = shards.path(name), shards.files[name].size
        return [
            RemoteTensor(each.name, each.path, each.shape, each.dtype, each.offset, shards)
            for each in parse_header(path, size, partial(shards.read, name))
        ]

    return StreamedCheckpoint(shards, gather(shards.folder, sorted(shards.files), tensors))
