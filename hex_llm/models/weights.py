"""Declaring a model's weights.

    @pytree
    class Mlp:
        gate_up: Weight = fused(("gate_proj.weight", "up_proj.weight"), ("mlp", "mlp"), "embed")
        down: Weight = tensor("down_proj.weight", "embed mlp")

The field is everything there is to say about a weight: its name in the code, its name in the checkpoint, and its
dimensions, which are the same in both. Shape, sharding, dummy values and the strict load follow from the names
of the dimensions.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding

from hex_llm.models.arch import Arch
from hex_llm.parallel.sharding import RULES, num_shards, sharding

type Weight = Array
type Condition = Callable[[Arch], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the checkpoint."""

    name: str
    dims: tuple[str, ...]

    def shape(self, arch: Arch) -> tuple[int, ...]:
        return tuple(arch.sizes[dim] for dim in self.dims)


@dataclasses.dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight: its parts in the checkpoint, laid one after the other along their first dimension.

    Where that dimension is split, shard i of the weight holds shard i of each part in turn, so that a device
    finds its own heads together. On one device that is plain concatenation.
    """

    parts: tuple[Part, ...]
    when: Condition | None = None  # None: always there
    dummy: float | None = None  # the value of a dummy weight; None: random

    def shape(self, arch: Arch) -> tuple[int, ...]:
        shapes = [part.shape(arch) for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return sharding(mesh, self.parts[0].dims)

    def num_row_shards(self, mesh: Mesh) -> int:
        return num_shards(mesh, self.parts[0].dims[0])

    def under(self, prefix: str) -> "WeightSpec":
        parts = tuple(dataclasses.replace(part, name=prefix + part.name) for part in self.parts)
        return dataclasses.replace(self, parts=parts)


def tensor(name: str, dims: str, *, when: Condition | None = None, dummy: float | None = None) -> Any:
    """A field that holds one tensor of the checkpoint, or None where the model has none."""
    spec = WeightSpec((Part(name, tuple(dims.split())),), when, dummy)
    return dataclasses.field(metadata={"spec": spec})


def fused(names: tuple[str, ...], rows: tuple[str, ...], columns: str = "", *, when: Condition | None = None) -> Any:
    """A field that holds several tensors as one, each with its own first dimension: one large matmul, not three."""
    if len({RULES[dim] for dim in rows}) != 1:
        raise ValueError(f"{rows} are not split alike, so {names} cannot be one array")
    parts = zip(names, rows, strict=True)
    spec = WeightSpec(tuple(Part(name, (row, *columns.split())) for name, row in parts), when)
    return dataclasses.field(metadata={"spec": spec})


def nested(cls: type, prefix: str) -> Any:
    """A field that holds more weights, whose checkpoint names start with `prefix`."""
    return dataclasses.field(metadata={"nested": (cls, prefix)})


def repeated(cls: type, prefix: str) -> Any:
    """A field that holds a tuple of them, one per layer; `{}` in the prefix is the layer's number."""
    return dataclasses.field(metadata={"repeated": (cls, prefix)})


def build[T](cls: type[T], arch: Arch, make: Callable[[WeightSpec], Any], prefix: str = "") -> T:
    """A model whose every weight is what `make` returns for it."""

    def value(field: dataclasses.Field) -> Any:
        match field.metadata:
            case {"spec": spec}:
                return make(spec.under(prefix)) if spec.when is None or spec.when(arch) else None
            case {"nested": (inner, start)}:
                return build(inner, arch, make, prefix + start)
            case {"repeated": (inner, start)}:
                layers = range(arch.num_layers)
                return tuple(build(inner, arch, make, prefix + start.format(i)) for i in layers)
        raise TypeError(f"{cls.__name__}.{field.name} is not declared by tensor, fused, nested or repeated")

    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    return cls(**{field.name: value(field) for field in fields})


def specs(cls: type, arch: Arch) -> list[WeightSpec]:
    """Every weight of the model, in the order of declaration."""
    found: list[WeightSpec] = []
    build(cls, arch, found.append)
    return found


def abstract[T](cls: type[T], arch: Arch, mesh: Mesh, dtype: Any) -> T:
    """The model with shapes in place of arrays, to compile for before anything is loaded."""
    return build(
        cls,
        arch,
        lambda spec: jax.ShapeDtypeStruct(spec.shape(arch), dtype, sharding=spec.sharding(mesh)),
    )


def bytes_per_device(cls: type, arch: Arch, mesh: Mesh, dtype: Any) -> int:
    """How much of each device's memory the weights will take."""
    leaves = jax.tree.leaves(abstract(cls, arch, mesh, dtype))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
