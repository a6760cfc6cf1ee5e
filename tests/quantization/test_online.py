"""Weights that are brought to few bits while they are loaded."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.quant_matmul import reference
from hex_llm.kernels.quant_matmul.weight import Packed
from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.loader.config_json import read_config
from hex_llm.loader.dummy import dummy
from hex_llm.loader.weights import load
from hex_llm.models.registry import family
from hex_llm.parallel.mesh import make_mesh
from hex_llm.quantization.online import PLAIN, Wanted, online
from tests.quantization.llama4 import join_experts, write_llama4

CODINGS: tuple[Wanted, ...] = get_args(Wanted.__value__)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-36, 1e-37, 1e-38, 1e-40])
def test_a_row_of_numbers_too_small_to_be_divided_by_becomes_zero_and_leaves_the_others_alone(coding, size):
    weight = np.random.default_rng(0).normal(0, 0.1, (4, 256)).astype(np.float32)
    small = weight.copy()
    small[2] *= size

    def decoded(values):
        return np.asarray(jax.jit(lambda each: reference.dequantize(online(coding).decode({PLAIN: each})))(values))

    got, want = decoded(jnp.asarray(small)), decoded(jnp.asarray(weight))
    assert np.abs(got[2]).max() < 1e-28
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(want, 2, 0))


def test_experts_keep_their_tokens_as_they_are_where_other_weights_multiply_whole_numbers(tmp_path):
    folder = join_experts(write_llama4(tmp_path / "model"))
    arch, checkpoint = read_config(folder).arch, open_checkpoint(folder)
    weights, mesh = family(arch).weights, make_mesh(1)

    def packed(model):
        leaves = jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, Packed))
        return [leaf for leaf in leaves if isinstance(leaf, Packed)]

    def loaded(coding: Wanted):
        return packed(load(weights, arch, checkpoint, mesh, jnp.float32, quantization=online(coding)))

    whole, plain = loaded("w8a8"), loaded("int8")
    random = packed(dummy(weights, arch, mesh, jnp.float32, quantization=online("w8a8")))
    assert {len(each.shape) for each in whole} == {2, 3}
    for one, other, third in zip(whole, plain, random, strict=True):
        assert one.coding == third.coding == ("int8" if len(one.shape) == 3 else "w8a8")
        assert other.coding == "int8"
        np.testing.assert_array_equal(one.scale, other.scale)
        np.testing.assert_array_equal(one.data, other.data)
