"""A model with shapes in place of arrays."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from hex_llm.models.arch import Arch
from hex_llm.models.few_bits import Quantization, abstract_packed, kept
from hex_llm.models.split import Split
from hex_llm.models.weights import WeightSpec, build


def abstract[T](cls: type[T], arch: Arch, mesh: Mesh, dtype: Any, quantization: Quantization | None = None) -> T:
    """The model to compile for before anything is loaded."""
    split = Split.over(arch, mesh)

    def make(spec: WeightSpec) -> Any:
        spec, numbers = kept(spec, quantization)
        if numbers is not None:
            return abstract_packed(spec, split, mesh, numbers, dtype)
        return jax.ShapeDtypeStruct(spec.shape(split), dtype, sharding=spec.sharding(mesh))

    return build(cls, arch, make)


def bytes_per_device(model: Any) -> int:
    """How much of each device's memory the weights of an abstract model will take."""
    leaves = jax.tree.leaves(model)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
