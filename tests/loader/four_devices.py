"""A program for test_weights.py: loads a model onto four virtual devices, and counts what they read."""

import os
import tempfile
from collections import Counter
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["NPROC"] = "32"  # with fewer threads than devices need, XLA's CPU backend can wait for itself

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.loader.config_json import read_config
from hex_llm.loader.dummy import dummy
from hex_llm.loader.weights import load
from hex_llm.models.abstract import abstract, bytes_per_device
from hex_llm.models.llama import Llama
from hex_llm.parallel.mesh import make_mesh
from hex_llm.safetensors_file import LazyTensor
from tests.checkpoints import llama_config, random_tensors, write_llama

READ: Counter[str] = Counter()  # bytes, by tensor


def count_reads() -> None:
    read = LazyTensor.__getitem__

    def __getitem__(self: LazyTensor, index: tuple[slice, ...]) -> np.ndarray:  # noqa: N807
        part = read(self, index)
        READ[self.name] += part.nbytes
        return part

    LazyTensor.__getitem__ = __getitem__


def main() -> None:
    changes = {"attention_bias": True, "mlp_bias": True}
    tensors = random_tensors(llama_config(**changes))
    with tempfile.TemporaryDirectory() as name:
        folder = write_llama(Path(name), num_files=2, **changes)
        arch = read_config(folder).arch
        mesh = make_mesh(4)
        count_reads()
        model = load(Llama, arch, open_checkpoint(folder), mesh, jnp.float32)

    # A split tensor is read once in all; one that every device holds is read once and handed on.
    assert {name: tensor.nbytes for name, tensor in tensors.items()} == READ, READ

    prefix = "model.layers.1."
    q, k, v, o = (tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkvo")
    gate_bias, up_bias = (tensors[f"{prefix}mlp.{part}_proj.bias"] for part in ("gate", "up"))
    for i, device in enumerate(mesh.devices):
        own = {
            jax.tree_util.keystr(path): next(s.data for s in array.addressable_shards if s.device == device)
            for path, array in jax.tree_util.tree_leaves_with_path(model)
        }
        expected = {
            ".layers[1].attention.qkv": np.concatenate([np.split(part, 4)[i] for part in (q, k, v)]),
            ".layers[1].attention.o": np.split(o, 4, axis=1)[i],
            ".layers[1].mlp.gate_up_bias": np.concatenate([np.split(b, 4)[i] for b in (gate_bias, up_bias)]),
            ".embed": np.split(tensors["model.embed_tokens.weight"], 4)[i],
            ".norm": tensors["model.norm.weight"],
        }
        for name, part in expected.items():
            np.testing.assert_array_equal(own[name], part, name)
        assert sum(array.nbytes for array in own.values()) == bytes_per_device(abstract(Llama, arch, mesh, jnp.float32))

    made = dummy(Llama, arch, mesh, jnp.float32)
    shards = jax.tree.map(lambda array: array.sharding.shard_shape(array.shape), (model, made))
    assert shards[0] == shards[1]


if __name__ == "__main__":
    main()
