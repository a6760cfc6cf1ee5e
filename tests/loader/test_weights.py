"""Weights arrive whole, in their places, in the type asked for; what does not fit is refused before any device copy."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hex_llm.errors import CheckpointError
from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.loader.config_json import parse_config
from hex_llm.loader.contents import check_checkpoint
from hex_llm.loader.dummy import dummy
from hex_llm.loader.weights import load
from hex_llm.models.llama import Llama
from hex_llm.parallel.mesh import make_mesh
from tests.checkpoints import llama_config, random_tensors, write_tensors

UP = "model.layers.1.mlp.up_proj.weight"


def load_tensors(folder, tensors, *, config=None, dtype=jnp.float32, num_files=1, **options):
    write_tensors(folder, tensors, num_files=num_files)
    arch = parse_config(config or llama_config(), "config.json").arch
    return load(Llama, arch, open_checkpoint(folder), make_mesh(), dtype, **options)


def refusal(folder, tensors, *, config=None, **options):
    with pytest.raises(CheckpointError) as caught:
        load_tensors(folder, tensors, config=config, **options)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def no_copy(monkeypatch):
    """Fails the test if anything goes to a device."""

    def copy(*_):
        raise AssertionError("a device copy")

    monkeypatch.setattr(jax, "make_array_from_callback", copy)


@pytest.mark.parametrize("num_files", [1, 3])
def test_every_tensor_is_in_its_place(tmp_path, num_files):
    config = llama_config(attention_bias=True, mlp_bias=True, head_dim=16)
    tensors = random_tensors(config)
    model = load_tensors(tmp_path, tensors, config=config, num_files=num_files)
    layer, prefix = model.layers[1], "model.layers.1."

    def same(array, *names):
        np.testing.assert_array_equal(array, np.concatenate([tensors[name] for name in names]))

    same(model.embed, "model.embed_tokens.weight")
    same(model.norm, "model.norm.weight")
    same(model.head, "lm_head.weight")
    same(layer.attention_norm, prefix + "input_layernorm.weight")
    same(layer.mlp_norm, prefix + "post_attention_layernorm.weight")
    for kind, qkv, gate_up, o, down in (
        ("weight", layer.attention.qkv, layer.mlp.gate_up, layer.attention.o, layer.mlp.down),
        ("bias", layer.attention.qkv_bias, layer.mlp.gate_up_bias, layer.attention.o_bias, layer.mlp.down_bias),
    ):
        same(qkv, *(f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv"))
        same(gate_up, *(f"{prefix}mlp.{part}_proj.{kind}" for part in ("gate", "up")))
        same(o, f"{prefix}self_attn.o_proj.{kind}")
        same(down, f"{prefix}mlp.down_proj.{kind}")


@pytest.mark.parametrize("saved", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("asked", [jnp.float32, jnp.bfloat16])
def test_weights_are_converted_to_the_type_asked_for(tmp_path, saved, asked):
    tensors = random_tensors(llama_config(), dtype=saved)
    model = load_tensors(tmp_path, tensors, dtype=asked)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(asked)}
    np.testing.assert_array_equal(model.layers[1].mlp.gate_up[96:], tensors[UP].astype(asked))


def test_a_loaded_model_does_not_change_with_its_file(tmp_path):
    tensors = random_tensors(llama_config())
    model = load_tensors(tmp_path, tensors)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * (tmp_path / "model.safetensors").stat().st_size)
    np.testing.assert_array_equal(model.embed, tensors["model.embed_tokens.weight"])


@pytest.mark.usefixtures("no_copy")
@pytest.mark.parametrize("name", [UP, "model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    tensors = random_tensors(llama_config())
    del tensors[name]
    assert refusal(tmp_path, tensors) == f"{tmp_path} lacks 1 tensor ({name}) that config.json calls for."


@pytest.mark.usefixtures("no_copy")
def test_many_missing_tensors_are_counted_and_some_named(tmp_path):
    message = refusal(tmp_path, random_tensors(llama_config()), config=llama_config(num_hidden_layers=4))
    assert "lacks 18 tensors (model.layers.2.input_layernorm.weight, " in message
    assert len(message) < 400


@pytest.mark.usefixtures("no_copy")
@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "x"])
def test_an_extra_tensor_is_named(tmp_path, name):
    tensors = random_tensors(llama_config()) | {name: np.zeros(3, np.float32)}
    assert refusal(tmp_path, tensors) == f"{tmp_path} has 1 tensor ({name}) that config.json has no place for."


def test_harmless_extra_tensors_are_passed_over(tmp_path):
    config = llama_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert load_tensors(tmp_path, tensors, config=config).head is None


@pytest.mark.usefixtures("no_copy")
@pytest.mark.parametrize("shape", [(96, 65), (64, 96), (96 * 64,), (96, 64, 1)])
def test_a_wrong_shape_is_named_with_what_was_expected(tmp_path, shape):
    tensors = random_tensors(llama_config()) | {UP: np.zeros(shape, np.float32)}
    message = refusal(tmp_path, tensors)
    assert message == (
        f"Tensor {UP} in {tmp_path / 'model.safetensors'} has shape {list(shape)}; config.json makes it [96, 64]."
    )


@pytest.mark.usefixtures("no_copy")
def test_a_type_that_is_no_weight_is_named(tmp_path):
    tensors = random_tensors(llama_config()) | {UP: np.zeros((96, 64), np.int8)}
    assert f"Tensor {UP} in {tmp_path / 'model.safetensors'} is of type int8" in refusal(tmp_path, tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_tensor_with_a_value_that_is_no_number_is_named(tmp_path, value, dtype):
    tensors = random_tensors(llama_config(), dtype=dtype)
    tensors[UP][95, 63] = value
    words = f"Tensor {UP} in {tmp_path / 'model.safetensors'} holds NaN or infinity."
    assert refusal(tmp_path, tensors) == words
    assert refusal(tmp_path, tensors, check="full") == words
    load_tensors(tmp_path, tensors, check="off")


def test_a_sample_of_a_large_tensor_finds_it_when_all_of_it_is_damaged_and_full_finds_one_value(tmp_path):
    config = llama_config(vocab_size=8192)
    tensors = random_tensors(config)
    head = tensors["lm_head.weight"]
    head[5, 5] = np.nan
    load_tensors(tmp_path, tensors, config=config)
    assert "lm_head.weight" in refusal(tmp_path, tensors, config=config, check="full")
    head[:] = np.nan
    assert "lm_head.weight" in refusal(tmp_path, tensors, config=config)


def test_the_log_tells_bytes_and_rate(tmp_path, caplog):
    tensors = random_tensors(llama_config(vocab_size=8192))
    with caplog.at_level(logging.INFO, "hex_llm"):
        load_tensors(tmp_path, tensors, config=llama_config(vocab_size=8192))
    megabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    assert re.search(rf"Loaded {megabytes:.2f} MB of weights in [\d.]+ s \([\d.]+ .B/s\)", caplog.text)


def test_each_device_reads_only_its_own_shard():
    """In a process with four devices, since this one has been given its own."""
    command = [sys.executable, "-m", "tests.loader.four_devices"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_dummy_weights_are_shaped_like_loaded_ones_and_follow_the_seed(tmp_path):
    config = llama_config(attention_bias=True)
    arch = parse_config(config, "config.json").arch
    loaded = load_tensors(tmp_path, random_tensors(config), config=config, dtype=jnp.bfloat16)
    one, same, other = (dummy(Llama, arch, make_mesh(), jnp.bfloat16, seed=seed) for seed in (1, 1, 2))
    assert jax.tree.map(jnp.shape, one) == jax.tree.map(jnp.shape, loaded)
    assert {leaf.dtype for leaf in jax.tree.leaves(one)} == {jnp.dtype(jnp.bfloat16)}
    assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(same)))
    assert not np.array_equal(one.layers[0].attention.qkv, other.layers[0].attention.qkv)
    assert not np.array_equal(one.layers[0].attention.qkv, one.layers[1].attention.qkv)
    assert (np.asarray(one.norm) == 1).all()
    assert np.std(np.asarray(one.embed, np.float32)) == pytest.approx(0.02, rel=0.05)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path):
    config = llama_config(tie_word_embeddings=True)
    arch, tensors = parse_config(config, "config.json").arch, random_tensors(config)
    write_tensors(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    check_checkpoint(Llama, arch, open_checkpoint(tmp_path))
    write_tensors(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"lm_head.weight .* differs from model.embed_tokens.weight"):
        check_checkpoint(Llama, arch, open_checkpoint(tmp_path))
