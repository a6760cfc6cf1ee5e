"""Checkpoints that the libraries of quantized formats wrote themselves."""

import dataclasses

import jax
import numpy as np
import pytest

from hex_llm.kernels.quant_matmul import api
from hex_llm.kernels.quant_matmul.layouts import unpack
from hex_llm.kernels.quant_matmul.reference import dequantize, matmul
from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.loader.config_json import read_config
from hex_llm.loader.contents import check_checkpoint
from hex_llm.model_fields import Fields
from hex_llm.models.registry import family
from hex_llm.quantization.read import read_method
from tests.checkpoints import write_llama
from tests.parity.test_logits import TOKENS, load_model, logits_of
from tests.quantization.llama4 import join_experts, write_llama4
from tests.quantization.writers import KINDS, gptq_kind, numbers, plain, rounded, write

EVERY = slice(None)
MODULE = "model.layers.0.mlp.up_proj"


def read_all(format, tensors, module):
    share = format.read(tensors, module, None, EVERY, EVERY)
    return np.asarray(dequantize(jax.jit(format.decode)(share.arrays)))[share.rows, share.columns]


@pytest.mark.parametrize(
    "settings",
    [
        {"load_in_8bit": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "bfloat16"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    ],
    ids=["int8", "nf4", "nf4 nested", "fp4 in bfloat16", "fp4 nested"],
)
def test_a_model_that_bitsandbytes_wrote_is_read_to_the_bit(oracle, settings, tmp_path):
    source = write_llama(tmp_path / "source", hidden_size=64, intermediate_size=192, num_hidden_layers=1)
    expected = oracle.bitsandbytes(source, tmp_path / "few", **settings)
    config, tensors = read_config(tmp_path / "few"), open_checkpoint(tmp_path / "few")
    assert config.quantization is not None
    check_checkpoint(family(config.arch).weights, config.arch, tensors, config.quantization)
    assert len(expected) == 7
    for module, matrix in expected.items():
        format = config.quantization.format(module)
        assert format is not None
        found = read_all(format, tensors, module)
        if "load_in_8bit" in settings:  # the library multiplies by its scale and by 1/127 one after the other
            np.testing.assert_allclose(found, matrix, rtol=3e-7)
        else:
            np.testing.assert_array_equal(found, matrix)


WORDS = [
    (4, 32, True),
    (4, 32, False),
    (4, None, True),
    (8, 64, True),
    (8, None, False),
]


@pytest.mark.parametrize(("bits", "group", "symmetric"), WORDS)
def test_words_that_compressed_tensors_packed_are_read_to_the_bit(oracle, bits, group, symmetric, tmp_path):
    weight = np.random.default_rng(bits).normal(0, 0.1, (48, 128)).astype(np.float32)
    _, scale, zero = rounded(weight, group, bits, not symmetric)
    weights = numbers(bits, "int", "group" if group else "channel", group_size=group, symmetric=symmetric)
    arrays = {"weight": weight, "weight_scale": scale}
    if not symmetric:
        arrays["weight_zero_point"] = (zero - 2 ** (bits - 1)).astype(np.int8)
    check_compressed(oracle, tmp_path, "pack-quantized", weights, arrays, None)


@pytest.mark.parametrize(("form", "kind"), [("float-quantized", "float"), ("int-quantized", "int")])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_bytes_that_compressed_tensors_wrote_are_read_to_the_bit(oracle, form, kind, strategy, tmp_path):
    weight = np.random.default_rng(0).normal(0, 0.1, (48, 128)).astype(np.float32)
    largest = np.abs(weight).max(axis=1, keepdims=True) if strategy == "channel" else np.abs(weight).max(keepdims=True)
    scale = largest / np.float32(448 if kind == "float" else 127)
    arrays = {"weight": weight, "weight_scale": scale if strategy == "channel" else scale.reshape(1)}
    inputs = numbers(8, kind, "token", dynamic=True)
    check_compressed(oracle, tmp_path, form, numbers(8, kind, strategy), arrays, inputs)


def check_compressed(oracle, folder, form, weights, arrays, inputs):
    expected = oracle.compressed_tensors(folder / "model.safetensors", MODULE, form, weights, arrays)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    format = read_method(Fields("config.json", config)).format(MODULE)
    assert format is not None
    tensors = open_checkpoint(folder)
    out, size = arrays["weight"].shape
    wanted = format.tensors(MODULE, out, size, None)
    assert wanted.keys() == tensors.keys()
    assert all(stored.admits(tensors[name].shape) for name, stored in wanted.items())
    np.testing.assert_array_equal(read_all(format, tensors, MODULE), expected)


def test_logits_of_experts_in_awq_equal_those_of_what_they_stand_for(oracle, many_devices, tmp_path):
    kind = KINDS["awq of 32"]
    packed = write(oracle.make("mixtral"), tmp_path / "packed", kind)
    expected = oracle.logits(plain(packed, tmp_path / "plain", kind), TOKENS)
    for found in (logits_of(*load_model(packed)), many_devices.logits(packed, 2)):
        assert np.abs(found - expected).max() <= 1e-4 * np.ptp(expected)


@pytest.mark.parametrize(
    ("mlp", "group", "devices"),
    [
        (384, 32, (2,)),
        (600, 24, (2, 4)),
    ],  # shares of 192, which are no whole tiles; of 300 and 160, and no whole groups
)
def test_logits_of_columns_in_an_order_are_the_same_on_all_numbers_of_devices(
    many_devices, mlp, group, devices, tmp_path
):
    kind = gptq_kind(4, group, sorts=True)
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": mlp}
    packed = write(write_llama(tmp_path / "source", num_hidden_layers=1, **sizes), tmp_path / "packed", kind)
    check_logits(many_devices, packed, plain(packed, tmp_path / "plain", kind), devices)


def test_logits_of_a_shared_expert_with_columns_in_an_order_are_the_same_on_two_devices(many_devices, tmp_path):
    kind = gptq_kind(4, 32, sorts=True)
    names = [f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")]
    kind = dataclasses.replace(kind, config=kind.config | {"modules_in_block_to_quantize": [names]})
    packed = write(write_llama4(tmp_path / "source"), tmp_path / "packed", kind, only="shared_expert")
    decoded = plain(packed, tmp_path / "plain", kind)
    check_logits(many_devices, join_experts(packed), join_experts(decoded), (2,))


@pytest.mark.parametrize(
    ("name", "far"),
    [("int-quantized", 0.05), ("int-quantized static", 1e-5)],  # tokens' own scales are those of devices' shares
)
def test_logits_with_tokens_in_whole_numbers_are_what_the_reference_makes_of_them(
    many_devices, monkeypatch, name, far, tmp_path
):
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 256}
    packed = write(write_llama(tmp_path / "source", num_hidden_layers=1, **sizes), tmp_path / "packed", KINDS[name])
    found, on_two = logits_of(*load_model(packed)), many_devices.logits(packed, 2)
    in_16_bits = logits_of(*load_model(plain(packed, tmp_path / "plain", KINDS[name])))
    taken = []

    def by_reference(x, weight, *, dtype):
        taken.append(weight.coding)
        return matmul(x, unpack(weight), dtype=dtype)

    monkeypatch.setattr(api, "matmul", by_reference)
    jax.clear_caches()
    expected = logits_of(*load_model(packed))
    assert set(taken) == {"w8a8"}
    assert len(taken) >= 4
    size = np.ptp(expected)
    assert np.abs(found - expected).max() <= 1e-5 * size
    assert np.abs(on_two - expected).max() <= far * size
    assert np.abs(in_16_bits - expected).max() > 1e-3 * size


def check_logits(many_devices, packed, plain, devices):
    expected = logits_of(*load_model(plain))
    for found in (logits_of(*load_model(packed)), *(many_devices.logits(packed, number) for number in devices)):
        assert np.abs(found - expected).max() <= 1e-4 * np.ptp(expected)
