"""A program for test_packed.py: a model brought to few bits while it is loaded, on so many virtual devices."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = sys.argv[1]
os.environ["NPROC"] = "32"  # with fewer threads than devices need, XLA's CPU backend can wait for itself

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.kernels.quant_matmul.layouts import unpack
from hex_llm.kernels.quant_matmul.reference import dequantize
from hex_llm.kernels.quant_matmul.weight import Packed
from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.loader.config_json import read_config
from hex_llm.loader.dummy import dummy
from hex_llm.loader.weights import load
from hex_llm.models.abstract import abstract, bytes_per_device
from hex_llm.models.few_bits import in_units
from hex_llm.models.registry import family
from hex_llm.parallel.mesh import make_mesh
from hex_llm.quantization.online import Wanted, online
from tests.checkpoints import write_llama

# How far a number may be from what it was: of the largest of its group, or of its own size.
STEPS: dict[Wanted, tuple[float, float]] = {
    "int8": (0.5 / 127 + 1e-6, 0),
    "w8a8": (0.5 / 127 + 1e-6, 0),
    "int4": (1.01 / 15, 0),
    "w4a8": (1.01 / 15, 0),
    "fp8": (2**-10, 2**-4),
}


def share_of(device: Any, array: jax.Array) -> jax.Array:
    return next(shard.data for shard in array.addressable_shards if shard.device == device)


def check(coding: Wanted, folder: Path, devices: int) -> None:
    mesh, how = make_mesh(devices), online(coding)
    arch = in_units(read_config(folder).arch, how, devices)
    weights, checkpoint = family(arch).weights, open_checkpoint(folder)
    plain = load(weights, arch, checkpoint, mesh, jnp.float32)
    few = load(weights, arch, checkpoint, mesh, jnp.float32, quantization=how)
    is_packed = lambda leaf: isinstance(leaf, Packed)  # noqa: E731
    pairs = zip(jax.tree.leaves(plain), jax.tree.leaves(few, is_leaf=is_packed), strict=True)
    packed = 0
    for was, now in pairs:
        if not isinstance(now, Packed):
            np.testing.assert_array_equal(was, now)
            continue
        packed += 1
        of_largest, of_own = STEPS[coding]
        for shard in was.addressable_shards:
            own = jax.tree.map(
                lambda a, d=shard.device: next(s.data for s in a.addressable_shards if s.device == d), now
            )
            values, codes = np.asarray(shard.data), unpack(own)
            groups = codes.scale.shape[-1]
            span = np.abs(values.reshape(values.shape[0], groups, -1)).max(-1, keepdims=True) * (
                2 if coding in ("int4", "w4a8") else 1
            )
            far = np.abs(np.asarray(dequantize(codes)) - values).reshape(values.shape[0], groups, -1)
            limit = span * of_largest + np.abs(values).reshape(far.shape) * of_own
            assert (far <= limit).all(), (coding, now.shape, (far - limit).max())
            assert not np.asarray(dequantize(codes))[values == 0].any(), "what is filled up is not zero"
    assert packed == 4 * arch.num_layers
    expected = abstract(weights, arch, mesh, jnp.float32, how)
    for model in (few, dummy(weights, arch, mesh, jnp.float32, quantization=how)):
        shapes = jax.tree.map(lambda array: (array.shape, array.dtype, array.sharding), (expected, model))
        assert shapes[0] == shapes[1]
    own_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(few))
    assert own_bytes == bytes_per_device(expected)


if __name__ == "__main__":
    # Heads that 3 devices do not divide, an mlp that neither 3 nor 4 do, and more devices than heads of keys.
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 200,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    with tempfile.TemporaryDirectory() as name:
        written = write_llama(Path(name), num_files=1, **sizes)
        for each in STEPS:
            check(each, written, int(sys.argv[1]))
