"""Programs for the TPU compiler, by name: see `compiler.Compiler.compile`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def product(devices: list, rows: int, columns: int) -> jax.stages.Lowered:
    """A matrix product, split over the devices by what is summed."""
    mesh = Mesh(np.array(devices), ("model",))

    def split(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    x, weight = split((rows, columns), None, "model"), split((columns, columns), "model")
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(jnp.dot, out_shardings=whole).trace(x, weight).lower(lowering_platforms=("tpu",))
