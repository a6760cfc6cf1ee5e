"""Which weights of a model are in few bits, and what of them a device has."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hex_llm.errors import CheckpointError
from hex_llm.kernels.quant_matmul.layouts import pack
from hex_llm.kernels.quant_matmul.weight import Codes, Coding, Packed, numbers_of
from hex_llm.models.arch import Arch
from hex_llm.models.split import Split
from hex_llm.models.weights import Part, WeightSpec
from hex_llm.parallel.backend import backend
from hex_llm.parallel.mesh import TENSOR
from hex_llm.parallel.sharding import RULES
from hex_llm.quantization.method import Format, Method, Numbers
from hex_llm.quantization.modules import HEAD
from hex_llm.quantization.online import Online

type Quantization = Method | Online

# Columns that devices' shares are multiples of: what kernels take, or groups at least, and what can lie in whole bytes.
UNITS, EXPERT_UNIT, SMALLEST_UNIT = (128, 64, 32), 64, 2
MOST_FILLED = 1.1  # of a weight: more is not worth it
_SUFFIX = ".weight"
# Of codes; of the others, uint8.
_TYPES: dict[Coding, Any] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
# Codings whose code 0 stands for zero, unless there is another one for it.
_ZERO_IS_0 = ("int8", "fp8", "mxfp4", "fp4")


def module_of(spec: WeightSpec, part: Part) -> str | None:
    """The module whose matrix a part is; None: it is none that could be in few bits. `{}` stands for an expert."""
    if not part.columns:
        return None
    if part.rows == ("vocab",) and not part.name.startswith(HEAD):
        return None  # a table that is looked up, not multiplied
    if part.name.endswith(_SUFFIX):
        return part.name.removesuffix(_SUFFIX)
    return part.name if spec.stack == "joined" else None


class Kept(NamedTuple):
    """A weight as a model's checkpoint has it."""

    spec: WeightSpec
    numbers: Numbers | None  # None: it is not in few bits


def kept(spec: WeightSpec, quantization: Quantization | None) -> Kept:
    if quantization is None:
        return Kept(spec, None)
    if isinstance(quantization, Online):
        modules = [module_of(spec, part) for part in spec.parts]
        takes = all(each is not None and quantization.takes(each) for each in modules)
        return Kept(spec, quantization if takes else None)
    if spec.apart:
        apart = dataclasses.replace(spec, parts=spec.apart, stack="tensors", apart=())
        if (found := _format(apart, quantization)) is not None:
            return Kept(apart, found)
    return Kept(spec, _format(spec, quantization))


def _format(spec: WeightSpec, method: Method) -> Format | None:
    modules = [module_of(spec, part) for part in spec.parts]
    found = [None if each is None else method.format(each.format(0)) for each in modules]
    if len(set(found)) > 1:
        raise CheckpointError(
            f"{' and '.join(part.name for part in spec.parts)} are one weight here, but {method.name} keeps them in "
            "different ways."
        )
    if spec.stack and found[0] is not None and found[0].has_order:
        raise CheckpointError(f"{spec.parts[0].name}: columns of experts in an order of their own are not served.")
    return found[0]


def in_units(arch: Arch, quantization: Quantization | None, num_devices: int) -> Arch:
    """The model, with shares of its mlp that kernels for weights in few bits take, where devices share those."""
    if quantization is None or num_devices == 1:
        return arch

    def filled(unit: int) -> float:
        """What devices have in all, of what there is."""
        return -(-arch.mlp_size // (num_devices * unit)) * unit * num_devices / arch.mlp_size

    if arch.num_experts:
        unit = EXPERT_UNIT if arch.mlp_size >= EXPERT_UNIT else SMALLEST_UNIT
    else:
        unit = next((unit for unit in UNITS if filled(unit) <= MOST_FILLED), SMALLEST_UNIT)
    return dataclasses.replace(arch, mlp_unit=unit)


@dataclass(frozen=True, slots=True)
class Local:
    """A device's share of a weight in few bits."""

    experts: int | None
    out: int
    size: int
    groups: int  # of columns

    @property
    def group(self) -> int:
        return self.size // self.groups

    def codes(self, numbers: Numbers) -> Codes:
        """Their shapes."""
        lead = () if self.experts is None else (self.experts,)

        def array(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        per_group = (*lead, self.out, self.groups)
        return Codes(
            codes=array((*lead, self.out, self.size), _TYPES.get(numbers_of(numbers.coding), jnp.uint8)),
            scale=array(per_group),
            zero=array(per_group) if numbers.has_zero else None,
            order=array((self.size,), jnp.int32) if numbers.has_order else None,
            input_scale=array(()) if numbers.has_input_scale else None,
            coding=numbers.coding,
        )


def local_share(spec: WeightSpec, split: Split, numbers: Numbers) -> Local:
    """What each device has. Where shares do not end where groups do, groups are cut into smaller ones of one size."""
    (column,) = spec.parts[0].columns
    out, size = sum(split.shard(row) for part in spec.parts for row in part.rows), split.shard(column)
    runs = [split.runs(column, device) for device in range(split.num_devices)]
    whole = all(sum(run.stop - run.start for run in each) == size for each in runs)
    zero_is_0 = numbers_of(numbers.coding) in _ZERO_IS_0 and not numbers.has_zero
    if numbers.group is None and (whole or zero_is_0):
        groups = 1
    else:  # what is filled up has groups of its own, of scale 0
        borders = [border for each in runs for run in each for border in run]
        groups = size // math.gcd(numbers.group or size, size, *borders)
    return Local(split.arch.num_experts if spec.stack else None, out, size, groups)


def spread(local: Packed, spec: WeightSpec, mesh: Mesh, make: Callable[[Any, tuple[int, ...], NamedSharding], Any]):
    """What `make` returns for each array of a device's share, the shape of all shares together and its sharding."""
    (column,) = spec.parts[0].columns
    lead = (None,) if spec.stack else ()
    matrix = PartitionSpec(*lead, RULES[spec.parts[0].rows[0]], RULES[column])

    def one(array: Any, parts: PartitionSpec) -> Any:
        if array is None:
            return None
        axes = [*parts, *[None] * (len(array.shape) - len(parts))]
        shape = tuple(size * (mesh.shape[TENSOR] if axis else 1) for size, axis in zip(array.shape, axes, strict=True))
        return make(array, shape, NamedSharding(mesh, parts))

    return Packed(
        data=one(local.data, matrix),
        scale=one(local.scale, matrix),
        zero=one(local.zero, matrix),
        order=one(local.order, PartitionSpec(RULES[column])),
        input_scale=one(local.input_scale, PartitionSpec()),
        coding=local.coding,
        layout=local.layout,
    )


def abstract_packed(spec: WeightSpec, split: Split, mesh: Mesh, numbers: Numbers, dtype: Any) -> Packed:
    """The weight with shapes in place of arrays, for tokens of `dtype`."""
    local = local_share(spec, split, numbers)
    return spread(
        _packed_shapes(local, numbers, dtype, backend()),
        spec,
        mesh,
        lambda array, shape, where: jax.ShapeDtypeStruct(shape, array.dtype, sharding=where),
    )


def codings(weights: list[WeightSpec], split: Split, quantization: Quantization | None) -> set[Coding]:
    """Of the weights in few bits, as they will be multiplied: where devices' shares cut groups, tokens may stay as they
    are."""
    found = [kept(spec, quantization) for spec in weights]
    shares = {(local_share(spec, split, numbers), numbers) for spec, numbers in found if numbers is not None}
    return {_packed_shapes(local, numbers, jnp.bfloat16, backend()).coding for local, numbers in shares}


@cache
def _packed_shapes(local: Local, numbers: Numbers, dtype: Any, device: str) -> Packed:
    """On a `device` of that kind. Traced once for all layers, which are alike."""
    return jax.eval_shape(partial(pack, dtype=dtype), local.codes(numbers))


def from_shares(shares: list[Packed], spec: WeightSpec, mesh: Mesh) -> Packed:
    """The weight whose shares the devices of this host have, in the order of the mesh."""
    leaves = [jax.tree.leaves(each) for each in shares]
    place = {id(leaf): i for i, leaf in enumerate(leaves[0])}

    def join(array: Array, shape: tuple[int, ...], where: NamedSharding) -> Array:
        own = [each[place[id(array)]] for each in leaves]
        return jax.make_array_from_single_device_arrays(shape, where, own)

    return spread(shares[0], spec, mesh, join)
