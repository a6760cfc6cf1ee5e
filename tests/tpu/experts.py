"""The experts of a layer at a model's sizes, as one device of several has them, for the TPU compiler."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hex_llm.kernels.grouped_matmul import tpu


def experts(
    devices: list, *, tokens: int, chosen: int, num_experts: int, width: int, size: int, bias: bool = False
) -> jax.stages.Lowered:
    """`size`: of a device's share of each expert's hidden layer."""
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("model",)), PartitionSpec())

    def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    x, gate_up, down = array(tokens, width), array(num_experts, 2 * size, width), array(num_experts, width, size)
    assert tpu.supports(x, gate_up, down)
    arguments = (
        x,
        gate_up,
        array(num_experts, 2 * size) if bias else None,
        down,
        array(tokens, chosen, dtype=jnp.int32),
        array(tokens, chosen, dtype=jnp.float32),
    )
    run = jax.jit(lambda *arrays: tpu.experts(*arrays, activation="silu"))
    return run.trace(*arguments).lower(lowering_platforms=("tpu",))
