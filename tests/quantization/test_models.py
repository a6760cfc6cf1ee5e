"""Whole models in quantized formats: what devices have of them, how well they answer, and which are refused."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hex_llm.build import find_model
from hex_llm.config import Config
from hex_llm.errors import CheckpointError, ConfigError
from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.loader.config_json import parse_config, read_config
from hex_llm.loader.contents import check_checkpoint
from hex_llm.loader.packed import load_packed
from hex_llm.models.abstract import abstract
from hex_llm.models.few_bits import kept
from hex_llm.models.registry import family
from hex_llm.models.split import Split
from hex_llm.models.weights import specs
from hex_llm.parallel.mesh import make_mesh
from hex_llm.quantization.online import online
from tests.checkpoints import llama_config, write_llama
from tests.quantization.models import FOLDER, share_right
from tests.quantization.writers import KINDS, awq, grouped, write

# One of each layout, in every run; all of them with -m slow.
SOME = [
    "awq", "gptq 4 zeros", "gptq 8 v2 sorted", "bitsandbytes int8", "bitsandbytes nf4 nested",
    "float-quantized static", "pack-quantized 4 sorted", "int-quantized zeros", "fbgemm_fp8", "int-quantized static",
]  # fmt: skip
ANSWERING = [
    "awq", "bitsandbytes int8", "bitsandbytes nf4", "float-quantized static", "int-quantized", "int-quantized static",
]  # fmt: skip
EVERY = 5  # of the questions, in every run
FOUR_BITS = ("awq", "gptq 4", "nf4", "fp4", "pack-quantized 4")


def on_devices(model: str, names: list[str]) -> None:
    command = [sys.executable, "-m", "tests.quantization.on_devices", model, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == names


@pytest.mark.parametrize("names", [SOME[:5], SOME[5:]], ids=["integers", "others"])
def test_devices_have_their_shares_bit_by_bit(names):
    on_devices("embedded", names)


UNEVEN = [
    "fp8 static", "float-quantized static", "float-quantized dynamic", "awq of rows", "bitsandbytes int8",
    "int-quantized static", "int-quantized",
]  # fmt: skip


def test_devices_have_their_shares_where_one_has_no_heads_and_the_mlp_is_filled_up():
    on_devices("uneven", UNEVEN)


def test_devices_have_their_shares_of_experts_that_have_a_tensor_each_in_few_bits_only():
    on_devices("llama4", ["awq of 32", "float-quantized static", "float-quantized dynamic"])


@pytest.mark.slow
def test_devices_have_their_shares_of_all_formats_bit_by_bit():
    on_devices("embedded", [name for name in KINDS if name not in SOME])


def check_answers(name: str, every: int, folder) -> None:
    """A question or two in a hundred may be lost to rounding, five with 4 bits."""
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    lost = 0.05 if any(word in name for word in FOUR_BITS) else 0.02
    found = share_right(write(FOLDER, folder / "model", KINDS[name]), every, cache)
    print(f"{name}: {found:.4f} of every {every}th question")
    assert found >= share_right(FOLDER, every, cache) - lost


@pytest.mark.parametrize("name", ANSWERING)
def test_the_embedded_model_answers_as_well(name, tmp_path):
    check_answers(name, EVERY, tmp_path)


@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("quantization", "lost"), [("int8", 0.02), ("w8a8", 0.02), ("fp8", 0.02), ("int4", 0.05), ("w4a8", 0.05)]
)
def test_the_embedded_model_answers_as_well_when_it_is_brought_to_few_bits_while_loading(quantization, lost, every):
    assert find_model(Config(model=str(FOLDER), quantization=quantization)).quantization == online(quantization)
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    found = share_right(FOLDER, every, cache, quantization)
    print(f"--quantization={quantization}: {found:.4f} of every {every}th question")
    assert found >= share_right(FOLDER, every, cache) - lost


@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.slow)])
def test_the_embedded_model_answers_as_well_in_awq_with_tokens_in_float8(every, tmp_path):
    folder = write(FOLDER, tmp_path / "model", KINDS["awq"])
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    found = share_right(folder, every, cache, "w4a8")
    print(f"awq and tokens in float8: {found:.4f} of every {every}th question")
    assert found >= share_right(FOLDER, every, cache) - 0.05


def coarse(weight, module):
    """AWQ with four of its sixteen codes."""
    parts = grouped(weight, 128)
    low = parts.min(axis=2, keepdims=True)
    step = (parts.max(axis=2, keepdims=True) - low) / 3
    return awq((np.rint((parts - low) / step) * step + low).reshape(weight.shape), module, 128)


def test_answers_tell_weights_that_are_rounded_too_far(tmp_path):
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    folder = write(FOLDER, tmp_path / "model", dataclasses.replace(KINDS["awq"], pack=coarse))
    assert share_right(folder, EVERY, cache) < share_right(FOLDER, EVERY, cache) - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_embedded_model_answers_all_questions_as_well(name, tmp_path):
    check_answers(name, 1, tmp_path)


def quantized(folder, name):
    """A tiny model whose sizes go with groups of 64."""
    source = write_llama(folder / "source", hidden_size=64, intermediate_size=128)
    return write(source, folder / "model", KINDS[name])


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


QWEIGHT, QZEROS = (f"model.layers.1.mlp.up_proj.{name}" for name in ("qweight", "qzeros"))


def cut(tensors):
    tensors[QWEIGHT] = np.ascontiguousarray(tensors[QWEIGHT][:-1])


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("awq of 32", lambda folder: change_tensors(folder, cut), [QWEIGHT, "[63, 16]", "[64, 16]"]),
        ("awq of 32", lambda folder: change_tensors(folder, lambda all: all.pop(QZEROS)), [QZEROS, "lacks"]),
        ("awq of 32", lambda folder: change_config(folder, group_size=48), ["64 columns", "groups of 48"]),
        ("awq of 32", lambda folder: change_config(folder, bits=3), ["quantization_config.bits is 3"]),
        ("gptq 4 zeros", lambda folder: change_config(folder, bits=3), ["quantization_config.bits is 3"]),
        ("awq of 32", lambda folder: change_config(folder, quant_method="quip"), ["quant_method is 'quip'"]),
        ("awq of 32", lambda folder: change_config(folder, version="gemv"), ["version is 'gemv'"]),
        ("awq of 32", lambda folder: change_config(folder, quant_method="mxfp4"), ["quantization_config.bits is 4"]),
    ],
    ids=["cut", "no zeros", "group", "bits", "gptq bits", "method", "version", "another method"],
)
def test_a_server_refuses_what_it_cannot_read_with_exit_3_and_the_name(name, damage, words, tmp_path):
    folder = quantized(tmp_path, name)
    damage(folder)
    command = [sys.executable, "-m", "hex_llm.server.api_server", f"--model={folder}", "--port=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(("name", "method"), [("awq of 32", "awq"), ("int-quantized", "compressed-tensors")])
@pytest.mark.parametrize("quantization", ["int8", "w8a8", "fp8", "int4"])
def test_a_model_in_few_bits_is_not_brought_to_others(name, method, quantization, tmp_path):
    folder = quantized(tmp_path, name)
    with pytest.raises(ConfigError, match=rf"--quantization={quantization} .* already, .*: {method}\."):
        find_model(Config(model=str(folder), quantization=quantization))
    assert find_model(Config(model=str(folder))).quantization is not None


NO_W4A8 = [
    ("awq of 32", "int4, 32 columns with a scale. Leave the flag out."),
    ("gptq 4 sorted", "int4, 32 columns with a scale, sorted. Leave the flag out."),
    ("int-quantized", "w8a8, all columns with a scale. Leave the flag out."),
]


@pytest.mark.parametrize(("name", "reason"), NO_W4A8)
def test_tokens_are_not_said_to_be_rounded_where_none_would_be(name, reason, tmp_path):
    config = Config(model=str(quantized(tmp_path, name)), quantization="w4a8")
    with pytest.raises(ConfigError, match=rf"--tensor_parallel_size=1 this model has no .*: {reason}"):
        find_model(config)


def test_tokens_are_not_rounded_where_devices_shares_of_columns_cut_groups(tmp_path):
    """Those of 192 columns have groups of 64, and those of 384 groups of 128, but not where two devices share them."""
    shape = {"hidden_size": 192, "intermediate_size": 384, "head_dim": 64}
    folder = write_llama(tmp_path / "model", num_attention_heads=6, num_key_value_heads=6, **shape)
    assert find_model(Config(model=str(folder), quantization="w4a8")).quantization == online("w4a8")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .*: use --quantization=int4\."):
        find_model(Config(model=str(folder), quantization="w4a8", tensor_parallel_size=2))


def test_weights_brought_to_4_bits_while_loading_have_enough_columns_for_tokens_in_float8(tmp_path):
    folder = write_llama(tmp_path / "model", hidden_size=192, intermediate_size=192)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=1 .*: use --quantization=int4\."):
        find_model(Config(model=str(folder), quantization="w4a8"))
    assert find_model(Config(model=str(folder), quantization="int4")).quantization == online("int4")


def check(folder):
    config = read_config(folder)
    check_checkpoint(family(config.arch).weights, config.arch, open_checkpoint(folder), config.quantization)


@pytest.mark.parametrize(("name", "groups"), [("gptq 4 sorted", "g_idx"), ("pack-quantized 4 sorted", "weight_g_idx")])
@pytest.mark.parametrize("changed", ["self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"])
def test_parts_of_one_weight_whose_columns_have_different_orders_are_named(name, groups, changed, tmp_path):
    folder = quantized(tmp_path, name)
    check(folder)
    module = f"model.layers.1.{changed}"

    def turn(tensors):
        tensors[f"{module}.{groups}"] = np.ascontiguousarray(tensors[f"{module}.{groups}"][::-1])

    change_tensors(folder, turn)
    with pytest.raises(CheckpointError, match=rf"{re.escape(module)}\.weight.* are one weight .* different orders"):
        check(folder)


@pytest.mark.parametrize("name", ["gptq 4 sorted", "pack-quantized 4 sorted"])
def test_experts_whose_columns_have_an_order_are_refused_before_anything_is_read(name):
    sizes = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2}
    config = llama_config(**sizes) | {"quantization_config": KINDS[name].config}
    found = parse_config(config, "config.json")
    with pytest.raises(CheckpointError, match=r"block_sparse_moe\.experts.*: columns of experts in an order"):
        abstract(family(found.arch).weights, found.arch, make_mesh(1), jnp.bfloat16, found.quantization)


def test_heads_that_are_filled_up_with_columns_in_an_order_are_named_with_the_devices(tmp_path):
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
    folder = write(write_llama(tmp_path / "source", **sizes), tmp_path / "model", KINDS["gptq 4 sorted"])
    assert load_o(folder, 1).order is not None
    with pytest.raises(CheckpointError, match=r"o_proj\.weight: 96 columns in an order .* by 4 devices"):
        load_o(folder, 4)


def load_o(folder, num_devices):
    """Of a layer's weights the one behind attention, as the first of so many devices has it."""
    config = read_config(folder)
    (o, *_) = (each for each in specs(family(config.arch).weights, config.arch) if "o_proj" in each.parts[0].name)
    spec, numbers = kept(o, config.quantization)
    assert numbers is not None
    split, dtype = Split(config.arch, num_devices), np.dtype(np.float32)
    return load_packed(
        spec, numbers, split, open_checkpoint(folder), make_mesh(1), dtype, "full", lambda num_bytes: None
    )


@pytest.mark.parametrize("name", ["float-quantized static", "int-quantized static"])
@pytest.mark.parametrize("scale", [0, -0.5, np.nan, np.inf])
def test_a_scale_by_which_tokens_cannot_be_divided_is_named(name, scale, tmp_path):
    kind = KINDS[name]

    def pack(weight, module):
        return kind.pack(weight, module) | {"input_scale": np.full(1, scale, np.float32)}

    source = write_llama(tmp_path / "source", hidden_size=64, intermediate_size=128)
    folder = write(source, tmp_path / "model", dataclasses.replace(kind, pack=pack))
    words = rf"layers\.\d\.self_attn\.o_proj\.input_scale is {scale:.1f}, not a finite number above 0"
    with pytest.raises(CheckpointError, match=words):
        load_o(folder, 1)
