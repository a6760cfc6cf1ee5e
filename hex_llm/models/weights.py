"""Declaring a model's weights.

    @pytree
    class Mlp:
        gate_up: Matrix = fused(("gate_proj.weight", "up_proj.weight"), ("mlp", "mlp"), "embed")
        down: Matrix = tensor("down_proj.weight", "embed mlp")

The field is everything there is to say about a weight: its name in the code, its name in the checkpoint, and its
dimensions. Shape, sharding, dummy values and the strict load follow from the names of the dimensions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from jax import Array
from jax.sharding import Mesh, NamedSharding

from hex_llm.kernels.quant_matmul.weight import Matrix
from hex_llm.models.arch import Arch
from hex_llm.models.split import Split
from hex_llm.parallel.sharding import RULES, sharding

__all__ = [
    "Matrix", "Part", "Weight", "WeightSpec", "build", "fused", "nested", "norm", "repeated", "specs", "tensor",
    "tensors", "weight",
]  # fmt: skip

type Weight = Array  # one that is multiplied with rows is a `Matrix`
type Condition = Callable[[Arch], bool]

# How the experts of a weight lie in the checkpoint: a tensor for each, with `{}` in its name for the number, or all in
# one tensor, along its first dimension.
type Stack = Literal["tensors", "joined"]

EXPERT = "expert"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the checkpoint, or one expert's part of it: runs of rows, each of its own dimension."""

    name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...] = ()
    transposed: bool = False  # in the checkpoint it lies as [columns, rows]
    alternating: bool = False  # in the checkpoint its two runs take turns, row by row
    neighbours: bool = False  # in the checkpoint the dimensions of a head that turn together are neighbours

    def shape(self, arch: Arch) -> tuple[int, ...]:
        """In the checkpoint."""
        shape = (sum(arch.sizes[row] for row in self.rows), *(arch.sizes[column] for column in self.columns))
        return shape[::-1] if self.transposed else shape


@dataclasses.dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight: its parts in the checkpoint, laid one after the other along their rows; with `stack`, an array of
    such weights, one for each expert.

    Where rows are split, shard i of the weight holds shard i of each run of rows in turn, so that a device finds its
    own heads together. On one device that is plain concatenation. `Split` says what a shard has.
    """

    parts: tuple[Part, ...]
    when: Condition | None = None  # None: always there
    neutral: bool = False  # in a dummy model it changes nothing; others are random there
    stack: Stack | None = None
    apart: tuple[Part, ...] = ()  # of what is joined: its parts in checkpoints that have a tensor for each expert

    @property
    def dims(self) -> tuple[str, ...]:
        dims = (self.parts[0].rows[0], *self.parts[0].columns)
        return (EXPERT, *dims) if self.stack else dims

    def shape(self, split: Split) -> tuple[int, ...]:
        """Of all devices' shares together."""
        return self._shape(split, split.size)

    def share(self, split: Split) -> tuple[int, ...]:
        """The shape of each device's share."""
        return self._shape(split, split.shard)

    def _shape(self, split: Split, size: Callable[[str], int]) -> tuple[int, ...]:
        rows = sum(size(row) for part in self.parts for row in part.rows)
        shape = (rows, *(size(column) for column in self.parts[0].columns))
        return (split.arch.num_experts, *shape) if self.stack else shape

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return sharding(mesh, self.dims)

    def tensors(self, arch: Arch) -> dict[str, tuple[int, ...]]:
        """The names and shapes in the checkpoint."""
        match self.stack:
            case None:
                return {part.name: part.shape(arch) for part in self.parts}
            case "joined":
                return {part.name: (arch.num_experts, *part.shape(arch)) for part in self.parts}
            case "tensors":
                experts = range(arch.num_experts)
                return {part.name.format(i): part.shape(arch) for i in experts for part in self.parts}

    def under(self, prefix: str) -> "WeightSpec":
        parts, apart = (
            tuple(dataclasses.replace(part, name=prefix + part.name) for part in parts)
            for parts in (self.parts, self.apart)
        )
        return dataclasses.replace(self, parts=parts, apart=apart)


def tensor(name: str, dims: str, *, when: Condition | None = None) -> Any:
    """A field that holds one tensor of the checkpoint, or None where the model has none."""
    row, *columns = dims.split()
    return weight(Part(name, (row,), tuple(columns)), when=when)


def norm(name: str, dim: str = "embed", *, when: Condition | None = None) -> Any:
    """A field that holds the weight of a norm."""
    return weight(Part(name, (dim,)), when=when, neutral=True)


def fused(
    names: tuple[str, ...],
    rows: tuple[str, ...],
    columns: str = "",
    *,
    when: Condition | None = None,
    stack: Stack | None = None,
) -> Any:
    """A field that holds several tensors as one, each with its own rows: one large matmul, not three."""
    parts = zip(names, rows, strict=True)
    return weight(*(Part(name, (row,), tuple(columns.split())) for name, row in parts), when=when, stack=stack)


def weight(
    *parts: Part,
    when: Condition | None = None,
    neutral: bool = False,
    stack: Stack | None = None,
    apart: tuple[Part, ...] = (),
) -> Any:
    """A field that holds these parts."""
    rows = [row for part in parts for row in part.rows]
    if len({RULES[dim] for dim in rows}) != 1:
        raise ValueError(f"{rows} are not split alike, so {[part.name for part in parts]} cannot be one array")
    return dataclasses.field(metadata={"spec": WeightSpec(parts, when, neutral, stack, apart)})


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
        raise TypeError(
            f"{cls.__name__}.{field.name} is not declared by tensor, norm, fused, weight, nested or repeated"
        )

    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    return cls(**{field.name: value(field) for field in fields})


def specs(cls: type, arch: Arch) -> list[WeightSpec]:
    """Every weight of the model, in the order of declaration."""
    found: list[WeightSpec] = []
    build(cls, arch, found.append)
    return found


def tensors(cls: type, arch: Arch) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model's checkpoint has, and its shape."""
    return {name: shape for spec in specs(cls, arch) for name, shape in spec.tensors(arch).items()}
