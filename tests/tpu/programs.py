"""Programs for the TPU compiler, by name: see `compiler.Compiler.compile`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hex_llm.catalog.entry import config_of
from hex_llm.catalog.index import find
from hex_llm.loader.config_json import parse_config
from hex_llm.parallel.backend import compiling_for
from hex_llm.parallel.manual import sum_over_devices
from hex_llm.parallel.mesh import make_mesh
from hex_llm.parallel.sharding import VOCABULARY, WHOLE
from hex_llm.runner.layout import Shapes
from hex_llm.runner.programs import CopyIn, CopyOut, Programs, Seat, name_of


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


def hand_over(devices: list, *, name: str, model: str, count: int, num_pages: int) -> jax.stages.Lowered:
    """A program by which an engine hands requests over or takes them, by its name: of a model, on the first devices."""
    entry = find(model)
    assert entry is not None
    arch = parse_config(config_of(entry), model).arch
    shapes = Shapes(256, 32, 4096, num_pages, max_fresh=8, mixed_tokens=0, max_model_len=131072, vocab_size=128256)
    with compiling_for("tpu"):
        programs = Programs(arch, shapes, None, jnp.bfloat16, make_mesh(count, devices), transfers=True)
        largest = programs.staging.counts[-1]
        program = next(each for each in (Seat(), CopyOut(largest), CopyIn(largest)) if name_of(each).startswith(name))
        arguments, donated = programs.arguments(program)
        traced = jax.jit(programs.function(program), donate_argnums=donated).trace(*arguments)
        return traced.lower(lowering_platforms=("tpu",))
