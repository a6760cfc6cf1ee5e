"""How the dimensions of a model lie over a row of devices, so that each has as much as any other.

Heads go together: a device has some heads of keys and values, and those of queries that look at them. Where there are
more devices than heads of keys and values, several devices have the same ones, each for a part of the queries. What the
devices do not divide is filled up with zeros, which change nothing: heads and columns of zeros add zero.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jax.sharding import Mesh

from hex_llm.models.arch import Arch
from hex_llm.parallel.mesh import TENSOR
from hex_llm.parallel.sharding import RULES


class Run(NamedTuple):
    """Rows `start` to `stop` of the model, which lie from `at` on in a device's share."""

    at: int
    start: int
    stop: int


@dataclass(frozen=True)
class Split:
    arch: Arch
    num_devices: int

    @classmethod
    def over(cls, arch: Arch, mesh: Mesh) -> "Split":
        return cls(arch, mesh.shape[TENSOR])

    @cached_property
    def kv_heads(self) -> int:
        """Heads of keys and values on each device."""
        return -(-self.arch.num_kv_heads // self.num_devices)

    @cached_property
    def heads(self) -> int:
        """Heads of queries on each device."""
        return self.kv_heads * self._group

    def shard(self, dim: str) -> int:
        """The size of each device's share of a dimension."""
        match dim:
            case "heads":
                return self.heads * self.arch.head_dim
            case "kv_heads":
                return self.kv_heads * self.arch.head_dim
            case "sinks":
                return self.heads
        size = self.arch.sizes[dim]
        if RULES[dim] is None:
            return size
        unit = self.arch.mlp_unit if dim == "mlp" else 1
        return -(-size // (self.num_devices * unit)) * unit

    def size(self, dim: str) -> int:
        """That of all shares together."""
        return self.shard(dim) * (1 if RULES[dim] is None else self.num_devices)

    def runs(self, dim: str, device: int) -> list[Run]:
        """What of a dimension a device has; where nothing is said there are zeros."""
        match dim:
            case "heads":
                return self._query_runs(device, self.arch.head_dim)
            case "sinks":
                return self._query_runs(device, 1)
            case "kv_heads":
                unit = self.arch.head_dim
                heads = enumerate(self._slots(device))
                return _joined([Run(i * unit, kv * unit, (kv + 1) * unit) for i, (kv, _) in heads])
        size, shard = self.arch.sizes[dim], self.shard(dim)
        first = 0 if RULES[dim] is None else device * shard
        return [Run(0, first, min(first + shard, size))] if first < size else []

    @cached_property
    def copies(self) -> int:
        """How many devices have the same head of keys and values."""
        return self.num_devices * self.kv_heads // self.arch.num_kv_heads

    @cached_property
    def _group(self) -> int:
        """Heads of queries to each head of keys and values of a device."""
        return -(-self._queries_per_kv // self.copies)

    @property
    def _queries_per_kv(self) -> int:
        return self.arch.num_heads // self.arch.num_kv_heads

    def _slots(self, device: int) -> list[tuple[int, int]]:
        """The device's heads of keys and values, and which copy of each it has."""
        slots = range(device * self.kv_heads, (device + 1) * self.kv_heads)
        return [divmod(slot, self.copies) for slot in slots if slot // self.copies < self.arch.num_kv_heads]

    def _query_runs(self, device: int, unit: int) -> list[Run]:
        runs = []
        for i, (kv, copy) in enumerate(self._slots(device)):
            first = min(copy * self._group, self._queries_per_kv)
            last = min(first + self._group, self._queries_per_kv)
            start = kv * self._queries_per_kv
            if first < last:
                runs.append(Run(i * self._group * unit, (start + first) * unit, (start + last) * unit))
        return _joined(runs)


def _joined(runs: list[Run]) -> list[Run]:
    """Runs that follow each other, here and there, as one: it is read at once."""
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].stop == run.start and run.at - joined[-1].at == run.start - joined[-1].start:
            joined[-1] = Run(joined[-1].at, joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined
