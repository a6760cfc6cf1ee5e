"""A program for test_models.py: a model of MODELS in the formats named, on 1, 2 and 4 virtual devices.

What each device has must be, bit by bit, its share of what the tests' decoder makes of the checkpoint.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
# What is tested is what the programs mean, not how well they are compiled, which takes longer.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["NPROC"] = "32"  # with fewer threads than devices need, XLA's CPU backend can wait for itself

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.kernels.quant_matmul import layouts
from hex_llm.kernels.quant_matmul.reference import dequantize
from hex_llm.kernels.quant_matmul.weight import Packed
from hex_llm.loader.checkpoint import Checkpoint, open_checkpoint
from hex_llm.loader.config_json import read_config
from hex_llm.loader.weights import load
from hex_llm.models.few_bits import in_units, kept
from hex_llm.models.registry import family
from hex_llm.models.weights import specs
from hex_llm.parallel.mesh import make_mesh
from tests.checkpoints import write_llama
from tests.quantization.llama4 import join_experts, write_llama4
from tests.quantization.models import first_layer
from tests.quantization.writers import KINDS, plain, write


def uneven(target: Path) -> Path:
    """Of four devices, one has no heads of its own; an mlp that they do not divide into tiles."""
    sizes = {"hidden_size": 96, "intermediate_size": 600, "num_attention_heads": 6, "num_key_value_heads": 3}
    return write_llama(target, num_hidden_layers=1, **sizes)


class Model(NamedTuple):
    write: Callable[[Path], Path]
    matrices: int  # that are in few bits
    as_loaded: Callable[[Path], Path] = lambda folder: folder  # what is decoded, with the names of plain checkpoints


MODELS = {
    "embedded": Model(first_layer, 4),
    "uneven": Model(uneven, 4),
    "llama4": Model(write_llama4, 6, join_experts),
}


def check(folder: Path, decoded: Path, devices: int, matrices: int) -> None:
    mesh, config, checkpoint = make_mesh(devices), read_config(folder), open_checkpoint(folder)
    arch = in_units(config.arch, config.quantization, devices)
    weights = family(arch).weights
    few = load(weights, arch, checkpoint, mesh, jnp.float32, quantization=config.quantization)
    wide = load(weights, arch, open_checkpoint(decoded), mesh, jnp.float32)
    leaves = jax.tree.leaves(few, is_leaf=lambda leaf: isinstance(leaf, Packed))
    assert sum(isinstance(leaf, Packed) for leaf in leaves) == matrices
    declared = [kept(spec, config.quantization).spec for spec in specs(weights, arch)]
    for spec, found, expected in zip(declared, leaves, jax.tree.leaves(wide), strict=True):
        if not isinstance(found, Packed):
            np.testing.assert_array_equal(found, expected)
            continue
        scale = largest_input_scale([part.name for part in spec.parts], checkpoint)
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
            assert own.input_scale == scale, (spec.parts[0].name, devices, own.input_scale, scale)


def largest_input_scale(names: list[str], checkpoint: Checkpoint) -> np.float32 | None:
    """Of a weight's tensors, of which those of experts have `{}` for the number in their names; None: there is none."""
    wanted = [re.escape(name.removesuffix("weight")).replace(r"\{\}", r"\d+") + "input_scale" for name in names]
    found = [checkpoint[name][()] for name in checkpoint for each in wanted if re.fullmatch(each, name)]
    assert len({float(each.reshape(())) for each in found}) == len(found), "modules with the same scale tell nothing"
    return np.float32(np.max(found)) if found else None


def main() -> None:
    model = MODELS[sys.argv[1]]
    with tempfile.TemporaryDirectory() as temporary:
        source = model.write(Path(temporary) / "source")
        for i, name in enumerate(sys.argv[2:]):
            folder = write(source, Path(temporary) / f"few-{i}", KINDS[name])
            decoded = model.as_loaded(plain(folder, Path(temporary) / f"decoded-{i}", KINDS[name]))
            for devices in (1, 2, 4):
                check(folder, decoded, devices, model.matrices)
            print(name, flush=True)


if __name__ == "__main__":
    main()
