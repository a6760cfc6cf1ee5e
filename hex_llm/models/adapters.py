"""Which weights of a model adapters can change, and what the devices keep for that."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hex_llm.kernels.lora_matmul.weight import Adapted, Own, Pairs
from hex_llm.kernels.quant_matmul.weight import Packed
from hex_llm.models.arch import Arch
from hex_llm.models.few_bits import module_of
from hex_llm.models.split import Split
from hex_llm.models.weights import Part, WeightSpec, build, specs
from hex_llm.parallel.sharding import RULES

_RANK = "rank"
_SLOT = 1  # the axis of slots, in all arrays of `Pairs`


@dataclass(frozen=True, slots=True)
class Room:
    """What there is for adapters on the devices."""

    slots: int
    rank: int  # the highest


class PairSpecs(NamedTuple):
    """Of a weight that adapters can change: the first of its parts' pairs, one after the other, and of each part the
    second."""

    down: WeightSpec
    up: tuple[WeightSpec, ...]


def pair_specs(spec: WeightSpec) -> PairSpecs | None:
    """None: adapters leave it as it is. Of experts, routers, the embedding and the head they do."""
    modules = [module_of(spec, part) for part in spec.parts]
    if spec.stack or None in modules or spec.parts[0].rows[0] in ("vocab", "expert"):
        return None
    first = [Part(f"{module}.lora_A.weight", (_RANK,), spec.parts[0].columns) for module in modules]
    second = [
        dataclasses.replace(part, name=f"{module}.lora_B.weight", columns=(_RANK,))
        for part, module in zip(spec.parts, modules, strict=True)
    ]
    return PairSpecs(WeightSpec(tuple(first)), tuple(WeightSpec((part,)) for part in second))


def adaptable(model: type, arch: Arch) -> dict[str, tuple[int, int]]:
    """The modules that adapters can change, as the checkpoint names them, with the numbers that go in and come out."""
    found: dict[str, tuple[int, int]] = {}
    for spec in specs(model, arch):
        if pair_specs(spec) is not None:
            for part in spec.parts:
                out, size = part.shape(arch)
                found[part.name.removesuffix(".weight")] = (size, out)
    return found


def with_rank(arch: Arch, room: Room) -> Arch:
    """The model, whose pairs are of that rank."""
    return dataclasses.replace(arch, adapter_rank=room.rank)


def build_pairs(model: type, arch: Arch, make: Callable[[PairSpecs], Any]) -> Any:
    """A model that has what `make` returns in place of weights that adapters can change, and None for the others."""

    def value(spec: WeightSpec) -> Any:
        pair = pair_specs(spec)
        return None if pair is None else make(pair)

    return build(model, arch, value)


def abstract_pairs(model: type, arch: Arch, mesh: Mesh, dtype: Any, room: Room) -> Any:
    """The pairs of all slots, with shapes in place of arrays."""
    split = Split.over(with_rank(arch, room), mesh)

    def array(shape: tuple[int, ...], dims: tuple[str | None, ...]) -> Any:
        where = NamedSharding(mesh, PartitionSpec(*(dim and RULES[dim] for dim in dims)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def make(pair: PairSpecs) -> Pairs:
        rows, size = pair.down.shape(split)
        (column,) = pair.down.parts[0].columns
        down = array((rows // room.rank, room.slots, room.rank, size), (None, None, None, column))
        up = [array((each.shape(split)[0], room.slots, room.rank), (each.dims[0], None, None)) for each in pair.up]
        return Pairs(down, tuple(up))

    return build_pairs(model, arch, make)


def packed_size(pairs: Any) -> int:
    """Numbers that each device gets of an adapter, given the pairs of all slots, or their shapes."""
    leaves = jax.tree.leaves(pairs)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) // leaf.shape[_SLOT] for leaf in leaves)


def write_slot(pairs: Any, packed: Array, slot: Array) -> Any:
    """The pairs of all slots, on a device, with those of one adapter in a slot: `packed` [1, n] has them one after the
    other, in the order of the tree. One array: what is many takes its time to get to a device, however small."""
    leaves, tree = jax.tree.flatten(pairs)
    written, start = [], 0
    for leaf in leaves:
        shape = list(leaf.shape)
        shape[_SLOT] = 1
        stop = start + math.prod(shape)
        new = packed[0, start:stop].reshape(shape)
        written.append(jax.lax.dynamic_update_slice_in_dim(leaf, new, slot, axis=_SLOT))
        start = stop
    return jax.tree.unflatten(tree, written)


def whose(slots: Array, num_slots: int) -> Own:
    """Of the slots [T] int32 whose adapters tokens have: 1 is the first of them, 0 is none."""
    return Own(slots, (slots[:, None] == jnp.arange(1, num_slots + 1, dtype=slots.dtype)[None, :]).astype(jnp.int8))


def adapted(model: Any, pairs: Any, own: Own) -> Any:
    """The model, with what adapters add to its weights."""

    def one(weight: Any, pair: Pairs | None) -> Any:
        return weight if pair is None else Adapted(weight, pair, own)

    return jax.tree.map(one, model, pairs, is_leaf=lambda node: node is None or isinstance(node, (Packed, Pairs)))
