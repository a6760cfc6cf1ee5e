"""A program for test_models.py: the embedded model's first layer in the formats named, on 1, 2 and 4 virtual devices.

What each device has must be, bit by bit, its share of what the tests' decoder makes of the checkpoint.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# What is tested is what the programs mean, not how well they are compiled, which takes longer.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
os.environ["NPROC"] = "32"  # with fewer threads than devices need, XLA's CPU backend can wait for itself

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.kernels.quant_matmul import layouts
from hex_llm.kernels.quant_matmul.reference import dequantize
from hex_llm.kernels.quant_matmul.weight import Packed
from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.loader.config_json import read_config
from hex_llm.loader.weights import load
from hex_llm.models.few_bits import in_units
from hex_llm.models.registry import family
from hex_llm.parallel.mesh import make_mesh
from tests.quantization.models import first_layer
from tests.quantization.writers import KINDS, plain, write

MATRICES = 4  # of a layer: qkv, o, gate and up, down


def check(folder: Path, decoded: Path, devices: int) -> None:
    mesh, config = make_mesh(devices), read_config(folder)
    arch = in_units(config.arch, config.quantization, devices)
    weights = family(arch).weights
    few = load(weights, arch, open_checkpoint(folder), mesh, jnp.float32, quantization=config.quantization)
    wide = load(weights, arch, open_checkpoint(decoded), mesh, jnp.float32)
    leaves = jax.tree.leaves(few, is_leaf=lambda leaf: isinstance(leaf, Packed))
    assert sum(isinstance(leaf, Packed) for leaf in leaves) == MATRICES
    for found, expected in zip(leaves, jax.tree.leaves(wide), strict=True):
        if not isinstance(found, Packed):
            np.testing.assert_array_equal(found, expected)
            continue
        for shard in expected.addressable_shards:
            own = jax.tree.map(
                lambda array, device=shard.device: next(
                    each.data for each in array.addressable_shards if each.device == device
                ),
                found,
            )
            share = np.asarray(shard.data)
            if own.order is not None:  # columns are anybody's
                share = np.asarray(expected)[shard.index[0]][:, np.asarray(own.order)]
            np.testing.assert_array_equal(np.asarray(dequantize(layouts.unpack(own))), share)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        source = first_layer(Path(temporary) / "source")
        for i, name in enumerate(sys.argv[1:]):
            folder = write(source, Path(temporary) / f"few-{i}", KINDS[name])
            decoded = plain(folder, Path(temporary) / f"decoded-{i}", KINDS[name])
            for devices in (1, 2, 4):
                check(folder, decoded, devices)
            print(name, flush=True)


if __name__ == "__main__":
    main()
