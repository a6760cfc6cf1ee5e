"""Dataclasses that JAX can look into."""

import dataclasses
from contextlib import suppress
from typing import dataclass_transform

import jax
from jax import export


@dataclass_transform(frozen_default=True)
def pytree[T](cls: type[T]) -> type[T]:
    """Makes a frozen dataclass of `cls` whose fields are all children of the tree, in exported programs too."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])
    with suppress(ValueError):  # a module that is loaded again has the name already
        export.register_pytree_node_serialization(
            cls,
            serialized_name=f"{cls.__module__}.{cls.__qualname__}",
            serialize_auxdata=lambda _: b"",
            deserialize_auxdata=lambda _: (),
        )
    return cls
