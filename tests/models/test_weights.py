import jax
import jax.numpy as jnp
import pytest

from hex_llm.errors import ConfigError
from hex_llm.loader.config_json import parse_config
from hex_llm.models.abstract import abstract, bytes_per_device
from hex_llm.models.llama import Llama
from hex_llm.models.weights import fused, tensors
from hex_llm.parallel.mesh import make_mesh
from tests.checkpoints import llama_config, llama_shapes

CONFIGS = [
    {},
    {"tie_word_embeddings": True},
    {"attention_bias": True, "mlp_bias": True},
    {"head_dim": 32, "num_key_value_heads": 2},
    {"num_key_value_heads": None, "num_hidden_layers": 3},
]


@pytest.mark.parametrize("changes", CONFIGS)
def test_declared_names_and_shapes_are_those_of_transformers(changes):
    config = llama_config(**changes)
    arch = parse_config(config, "config.json").arch
    assert tensors(Llama, arch) == llama_shapes(config)


def test_bytes_of_llama_8b_are_known_without_loading_it():
    sizes = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    arch = parse_config(llama_config(**sizes), "config.json").arch
    assert bytes_per_device(abstract(Llama, arch, make_mesh(), jnp.bfloat16)) == 2 * 8_030_261_248


def test_the_abstract_model_is_shaped_like_the_real_one():
    arch = parse_config(llama_config(attention_bias=True), "config.json").arch
    model = abstract(Llama, arch, make_mesh(), jnp.bfloat16)
    assert model.layers[1].attention.qkv.shape == ((8 + 4 + 4) * 8, 64)
    assert model.layers[0].mlp.gate_up_bias is None
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}


def test_tensors_that_are_split_differently_cannot_be_fused():
    with pytest.raises(ValueError, match="not split alike"):
        fused(("a", "b"), ("heads", "embed"))


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="num_request_devices 999 > num_available_devices 1"):
        make_mesh(999)
