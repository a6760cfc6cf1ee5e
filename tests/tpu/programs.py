"""Programs for the TPU compiler, by name: see `compiler.Compiler.compile`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hex_llm.parallel.manual import sum_over_devices
from hex_llm.parallel.mesh import make_mesh
from hex_llm.parallel.sharding import VOCABULARY, WHOLE


def product(devices: list, rows: int, columns: int) -> jax.stages.Lowered:
    """A matrix product, split over the devices by what is summed."""
    mesh = Mesh(np.array(devices), ("model",))

    def split(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    x, weight = split((rows, columns), None, "model"), split((columns, columns), "model")
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(jnp.dot, out_shardings=whole).trace(x, weight).lower(lowering_platforms=("tpu",))


def sums(devices: list, count: int) -> jax.stages.Lowered:
    """What each of the first devices has, added up, on an engine's own mesh of them."""
    mesh = make_mesh(count, devices)
    x = jax.ShapeDtypeStruct((8, 128 * count), jnp.bfloat16, sharding=NamedSharding(mesh, VOCABULARY))
    add = jax.shard_map(sum_over_devices, mesh=mesh, in_specs=VOCABULARY, out_specs=WHOLE, check_vma=False)
    return jax.jit(add).trace(x).lower(lowering_platforms=("tpu",))
