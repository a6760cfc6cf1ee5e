"""Dataclasses that JAX can look into."""

import dataclasses
from contextlib import suppress
from typing import Any, dataclass_transform

import jax
import msgspec
from jax import export


def static(**options: Any) -> Any:
    """A field of a pytree that is no array but a text, or yes or no: programs are compiled for it, as they are for a
    shape."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def pytree[T](cls: type[T]) -> type[T]:
    """Makes a frozen dataclass of `cls` whose fields, but for static ones, are children of the tree, in exported
    programs too."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    data = [field.name for field in fields if not field.metadata.get("static")]
    meta = [field.name for field in fields if field.metadata.get("static")]
    jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)
    with suppress(ValueError):  # a module that is loaded again has the name already
        export.register_pytree_node_serialization(
            cls,
            serialized_name=f"{cls.__module__}.{cls.__qualname__}",
            serialize_auxdata=lambda values: msgspec.msgpack.encode(values),
            deserialize_auxdata=lambda data: msgspec.msgpack.decode(data, type=tuple[str | bool, ...]),
        )
    return cls
