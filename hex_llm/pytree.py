"""Dataclasses that JAX can look into."""

import dataclasses
from typing import dataclass_transform

import jax


@dataclass_transform(frozen_default=True)
def pytree[T](cls: type[T]) -> type[T]:
    """Makes a frozen dataclass of `cls` whose fields are all children of the tree."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])
