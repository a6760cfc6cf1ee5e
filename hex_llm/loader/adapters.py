"""An adapter's pairs of matrices, as they go to the devices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hex_llm.loader.weights import read_share
from hex_llm.models.adapters import PairSpecs, Room, build_pairs, with_rank
from hex_llm.models.arch import Arch
from hex_llm.models.split import Split

type Pair = tuple[np.ndarray, np.ndarray]  # [rank, in] and [out, rank]


@dataclass(frozen=True, slots=True)
class _Filled:
    """One of a pair, filled up with zeros to a shape, or where an adapter has none, nothing but zeros."""

    name: str
    shape: tuple[int, ...]
    values: np.ndarray | None
    path = Path()

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        filled = np.zeros(self.shape, np.float32)
        if self.values is not None:
            filled[tuple(map(slice, self.values.shape))] = self.values
        return filled[index]


class _Tensors(Mapping[str, _Filled]):
    """An adapter's pairs by the names that PEFT gives them, in the model's shapes."""

    def __init__(self, pairs: Mapping[str, Pair], shapes: Mapping[str, tuple[int, ...]]):
        self._pairs = pairs
        self._shapes = shapes

    def __getitem__(self, name: str) -> _Filled:
        module, side = name.removesuffix(".weight").rsplit(".", 1)
        pair = self._pairs.get(module)
        return _Filled(name, self._shapes[name], pair and pair[("lora_A", "lora_B").index(side)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def pack_adapter(
    model: type, arch: Arch, num_devices: int, dtype: Any, room: Room, pairs: Mapping[str, Pair]
) -> np.ndarray:
    """[devices, n]: what each device has of an adapter, in the order in which `write_slot` takes it."""
    split = Split(with_rank(arch, room), num_devices)
    shares: list[list[np.ndarray]] = [[] for _ in range(num_devices)]

    def add(pair: PairSpecs) -> None:
        for spec in (pair.down, *pair.up):
            tensors = _Tensors(pairs, spec.tensors(split.arch))
            for device, share in enumerate(shares):
                share.append(read_share(spec, split, tensors, device, np.dtype(dtype), "off").ravel())

    build_pairs(model, arch, add)
    return np.stack([np.concatenate(share) for share in shares])
