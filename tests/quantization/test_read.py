"""What configs of quantized models say, and which of them are refused, by name."""

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hex_llm.errors import CheckpointError
from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.model_fields import Fields
from hex_llm.quantization.awq import Awq
from hex_llm.quantization.bitsandbytes import Int8 as BitsAndBytesInt8
from hex_llm.quantization.bitsandbytes import Table
from hex_llm.quantization.compressed import Int8, Words
from hex_llm.quantization.fp8 import Fp8
from hex_llm.quantization.gptq import Gptq
from hex_llm.quantization.mxfp4 import Mxfp4
from hex_llm.quantization.read import quantization_fields, read_method
from tests.quantization.writers import AUTO_FP8, AWQ, KINDS, STATIC, TOKENS, numbers

LAYER = "model.layers.0."
UP, HEAD, EMBED = f"{LAYER}mlp.up_proj", "lm_head", "model.embed_tokens"


def read(config: dict[str, Any]):
    return read_method(Fields("config.json", config, "quantization_config."))


QWEN_GPTQ = {
    "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
    "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "max_input_length": None,
    "model_seqlen": None, "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
    "pad_token_id": None, "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True,
    "use_cuda_fp16": False, "use_exllama": True,
}  # fmt: skip
LLAMA_NF4 = {
    "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False, "quant_method": "bitsandbytes",
}  # fmt: skip
GPT_OSS = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip


def compressed(kind="pack-quantized 4", weights=None, group=None, **changes):
    config = KINDS[kind].config
    whole = config["config_groups"]["group_0"]
    changed = {**whole, "weights": {**whole["weights"], **(weights or {})}, **(group or {})}
    return {**config, "config_groups": {"group_0": changed}, **changes}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ | {"group_size": 128}, Awq(128)),
        (AWQ | {"group_size": 128, "version": "GEMM"}, Awq(128)),
        ({"quant_method": "awq", "zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}, Awq(64)),
        (QWEN_GPTQ, Gptq("int4", 128, symmetric=True, has_order=False, shift=1)),
        (QWEN_GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, Gptq("int4", 128, False, False, 0)),
        (LLAMA_NF4, Table("nf4", nested=True, storage="uint8")),
        (LLAMA_NF4 | {"quant_method": None}, Table("nf4", nested=True, storage="uint8")),
        (KINDS["bitsandbytes int8"].config, BitsAndBytesInt8()),
        (KINDS["float-quantized static"].config, Fp8("matrix", has_input_scale=True)),
        (KINDS["float-quantized dynamic"].config, Fp8("row", has_input_scale=False)),
        (KINDS["int-quantized zeros"].config, Int8("row", False, "int8", has_input_scale=False)),
        (KINDS["int-quantized"].config, Int8("row", True, "w8a8", has_input_scale=False)),
        (KINDS["int-quantized static"].config, Int8("row", True, "w8a8", has_input_scale=True)),
        (KINDS["int-quantized of 16"].config, Int8("row", True, "int8", has_input_scale=False)),
        (  # zeros of what comes in
            compressed("int-quantized", group={"input_activations": TOKENS | {"symmetric": False}}),
            Int8("row", True, "int8", has_input_scale=False),
        ),
        (KINDS["pack-quantized 4 sorted"].config, Words("int4", "row", 32, symmetric=True, has_order=True)),
        (KINDS["pack-quantized 4 float8"].config, Words("w4a8", "row", 128, symmetric=True, has_order=False)),
        (KINDS["pack-quantized 4 float8 static"].config, Words("w4a8", "row", None, False, False, True)),
        (KINDS["fbgemm_fp8"].config, Fp8("row", has_input_scale=False)),
        (compressed(weights={"group_size": -1, "actorder": "group"}), Words("int4", "row", None, True, False)),
    ],
)
def test_a_linear_module_is_kept_as_the_config_says_and_head_and_embedding_are_not(config, expected):
    method = read(config)
    assert method.format(UP) == expected
    assert hash(method.format(UP)) == hash(expected)
    for kept in (HEAD, EMBED, f"{LAYER}block_sparse_moe.gate", f"{LAYER}mlp.router"):
        assert method.format(kept) is None


def test_only_the_experts_of_gpt_oss_are_in_mxfp4():
    method = read(GPT_OSS)
    assert (
        method.format(f"{LAYER}mlp.experts.gate_up_proj") == method.format(f"{LAYER}mlp.experts.down_proj") == Mxfp4()
    )
    assert method.format(f"{LAYER}self_attn.q_proj") is None


def test_words_of_awq_may_be_anywhere_in_a_name():
    method = read(AWQ | {"group_size": 128, "modules_to_not_convert": ["visual", "mlp.up"]})
    assert method.format(UP) is None
    assert method.format(f"{LAYER}mlp.down_proj") is not None


def test_gptq_may_take_the_head_or_only_some_modules():
    head = read(QWEN_GPTQ | {"lm_head": True})
    assert head.format(HEAD) == head.format(UP) is not None
    some = read(QWEN_GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert some.format(UP) is not None
    assert some.format(f"{LAYER}mlp.down_proj") is None


def test_dynamic_of_gptq_overrides_by_the_first_pattern():
    rules = {r"-:.*\.down_proj": {}, r"+:.*layers\.1\..*": {"bits": 8, "group_size": 32}, r".*gate": {"sym": False}}
    method = read(QWEN_GPTQ | {"dynamic": rules})
    assert method.format(UP) == Gptq("int4", 128, True, False, 1)
    assert method.format("model.layers.1.mlp.up_proj") == Gptq("int8", 32, True, False, 1)
    assert method.format("model.layers.1.mlp.down_proj") is None
    assert method.format(f"{LAYER}mlp.gate_proj") == Gptq("int4", 128, False, False, 1)


def test_modules_that_bitsandbytes_skips_are_named_whole():
    method = read(LLAMA_NF4 | {"llm_int8_skip_modules": ["model.layers.1", "q_proj"]})
    assert method.format("model.layers.1.mlp.up_proj") is None
    assert method.format("model.layers.10.mlp.up_proj") is not None
    assert method.format(f"{LAYER}self_attn.q_proj") is None
    assert method.format(HEAD) is not None  # transformers leaves it out only where nothing else is said


def test_groups_of_compressed_tensors_are_found_by_name_before_kind_and_ignored_by_either():
    down = {"targets": ["re:.*down_proj$"], "weights": numbers(8, "int", "channel"), "format": "pack-quantized"}
    every = {"targets": ["Linear"], "weights": numbers(4, "int", "group", group_size=128)}
    config = KINDS["pack-quantized 4"].config | {
        "config_groups": {"group_0": every, "group_1": down},
        "ignore": [HEAD, "re:.*self_attn.*", "model.layers.3.mlp.up_proj"],
    }
    method = read(config)
    assert method.format(UP) == Words("int4", "row", 128, True, False)
    assert method.format(f"{LAYER}mlp.down_proj") == Words("int8", "row", None, True, False)
    for ignored in (f"{LAYER}self_attn.q_proj", "model.layers.3.mlp.up_proj", HEAD):
        assert method.format(ignored) is None


def test_names_of_a_model_that_also_sees_mean_its_text_part():
    ignore = ["language_model.lm_head", "model.language_model.layers.2.mlp.up_proj", "re:vision_tower.*"]
    method = read(KINDS["pack-quantized 4"].config | {"ignore": ignore})
    assert method.format(HEAD) is method.format("model.layers.2.mlp.up_proj") is None
    assert method.format(UP) is not None


def test_what_a_checkpoint_may_have_beside_its_weights(tmp_path):
    attention = f"{LAYER}self_attn"
    values: dict[str, np.ndarray] = {
        f"{attention}.k_scale": np.ones(1, np.float32),
        f"{attention}.q_proj.bias": np.zeros(4, np.float32),
        f"{attention}.k_proj.bias": np.ones(4, np.float32),
        f"{UP}.input_scale": np.ones(1, np.float32),
        f"{UP}.input_zero_point": np.zeros(1, np.int8),
        f"{attention}.o_proj.input_zero_point": np.ones(1, np.int8),
        f"{UP}.weight_zero_point": np.zeros((4, 1), np.int8),
        f"{attention}.o_proj.weight_zero_point": np.ones((4, 1), np.int8),
        f"{UP}.weight_format": np.zeros((), np.uint8),
        f"{attention}.o_proj.weight_format": np.ones((), np.uint8),
    }
    save_file(values, tmp_path / "model.safetensors")
    tensors = open_checkpoint(tmp_path)

    def spare(config):
        method = read(config)
        names = (name for name in values if not name.endswith("o_proj.weight_format"))
        return {name.removeprefix(LAYER) for name in names if method.spare(tensors[name])}

    assert spare(AWQ | {"group_size": 128}) == {"self_attn.k_scale"}
    assert spare(QWEN_GPTQ) == {"self_attn.k_scale", "self_attn.q_proj.bias"}
    zeros = {"mlp.up_proj.input_zero_point", "mlp.up_proj.weight_zero_point"}
    assert spare(KINDS["int-quantized"].config) == {"self_attn.k_scale", "mlp.up_proj.input_scale", *zeros}
    asymmetric = compressed("int-quantized", group={"input_activations": TOKENS | {"symmetric": False}})
    assert spare(asymmetric) - spare(KINDS["int-quantized"].config) == {"self_attn.o_proj.input_zero_point"}
    int8 = KINDS["bitsandbytes int8"].config
    assert spare(int8) == {"self_attn.k_scale", "mlp.up_proj.weight_format"}
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_format .* is \[1\]"):
        read(int8).spare(tensors[f"{attention}.o_proj.weight_format"])


def test_old_models_say_it_elsewhere(tmp_path):
    assert quantization_fields(Fields("config.json", {}), tmp_path) is None
    old = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(old))
    found = quantization_fields(Fields("config.json", {}), tmp_path)
    assert found is not None
    assert read_method(found).format(UP) == Awq(128)
    (tmp_path / "quant_config.json").rename(tmp_path / "quantize_config.json")
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 3, "group_size": 128, "desc_act": False}))
    found = quantization_fields(Fields("config.json", {}), tmp_path)
    assert found is not None
    with pytest.raises(CheckpointError, match=r"quantize_config\.json: bits is 3"):
        read_method(found)
    config = {"quantization_config": AWQ | {"group_size": 32}}
    for values in (config, {"text_config": config}, {"compression_config": config["quantization_config"]}):
        found = quantization_fields(Fields("config.json", values), tmp_path)
        assert found is not None
        assert read_method(found).format(UP) == Awq(32)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "hqq"}, ["quant_method is 'hqq'", "awq"]),
        ({"bits": 4}, ["quant_method is missing"]),
        ({"quant_method": 7}, ["quant_method is 7"]),
        (AWQ | {"group_size": 128, "bits": 3}, ["bits is 3"]),
        (AWQ | {"group_size": 128, "version": "gemv"}, ["version is 'gemv'"]),
        (AWQ | {"group_size": 128, "backend": "llm-awq"}, ["backend is 'llm-awq'"]),
        (AWQ | {"group_size": 128, "zero_point": False}, ["zero_point is false"]),
        (AWQ | {"group_size": 0}, ["group_size is 0"]),
        (AWQ, ["group_size is missing"]),
        (AWQ | {"group_size": 128, "rotation": "hadamard"}, ["rotation is 'hadamard'"]),
        (QWEN_GPTQ | {"bits": 3}, ["bits is 3"]),
        (QWEN_GPTQ | {"bits": 2}, ["bits is 2"]),
        (QWEN_GPTQ | {"checkpoint_format": "marlin"}, ["checkpoint_format is 'marlin'"]),
        (QWEN_GPTQ | {"is_marlin_format": True}, ["is_marlin_format is True"]),
        (QWEN_GPTQ | {"pack_dtype": "int16"}, ["pack_dtype is 'int16'"]),
        (QWEN_GPTQ | {"dynamic": {"+:.*": {"bits": 3}}}, ["dynamic.+:.*.bits is 3"]),
        (QWEN_GPTQ | {"dynamic": {"+:.*": {"adapter": 1}}}, ["adapter is 1"]),
        (QWEN_GPTQ | {"dynamic": {"-:(a": {}}}, ["dynamic has the pattern '(a'"]),
        (QWEN_GPTQ | {"modules_in_block_to_quantize": "q_proj"}, ["modules_in_block_to_quantize"]),
        (LLAMA_NF4 | {"load_in_4bit": False}, ["load_in_8bit", "load_in_4bit", "false"]),
        (LLAMA_NF4 | {"bnb_4bit_quant_type": "int4"}, ["bnb_4bit_quant_type is 'int4'"]),
        (LLAMA_NF4 | {"bnb_4bit_quant_storage": "complex64"}, ["bnb_4bit_quant_storage is 'complex64'"]),
        (
            KINDS["bitsandbytes int8"].config | {"llm_int8_has_fp16_weight": True},
            ["llm_int8_has_fp16_weight is true"],
        ),
        (AUTO_FP8 | {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}, ["weight_block_size", "128"]),
        (AUTO_FP8 | {"activation_scheme": "magic"}, ["activation_scheme is 'magic'"]),
        (AUTO_FP8 | {"activation_scheme": "static", "fmt": "e5m2"}, ["fmt is 'e5m2'"]),
        (compressed(format="marlin-24"), ["format is 'marlin-24'"]),
        (compressed(format="nvfp4-pack-quantized"), ["format is 'nvfp4-pack-quantized'"]),
        (compressed(weights={"num_bits": 3}), ["config_groups.group_0.weights.num_bits is 3"]),
        (compressed(weights={"type": "float"}), ["type is 'float'", "pack-quantized"]),
        (compressed(weights={"strategy": "block"}), ["strategy is 'block'"]),
        (compressed(weights={"actorder": "magic"}), ["actorder is 'magic'"]),
        (compressed(weights={"dynamic": True}), ["dynamic is not false"]),
        (compressed("pack-quantized 8", group={"input_activations": STATIC}), ["input_activations", "words of 8 bits"]),
        (compressed(group={"input_activations": TOKENS}), ["input_activations.type is 'int'"]),
        (compressed(group={"output_activations": STATIC}), ["output_activations"]),
        (compressed(group={"weights": None}), ["weights is missing"]),
        (compressed("float-quantized static", weights={"strategy": "block"}), ["strategy is 'block'"]),
        (compressed("float-quantized static", group={"input_activations": None}), ["input_activations is missing"]),
        (compressed("float-quantized static", weights={"num_bits": 4}), ["num_bits is 4"]),
        (compressed("int-quantized", weights={"num_bits": 4}), ["num_bits is 4"]),
        (
            compressed("int-quantized", group={"input_activations": TOKENS | {"num_bits": 4}}),
            ["input_activations.num_bits is 4"],
        ),
        (compressed("int-quantized", group={"input_activations": STATIC}), ["input_activations.type is 'float'"]),
        (
            compressed("int-quantized", group={"input_activations": TOKENS | {"strategy": "group"}}),
            ["input_activations.strategy is 'group'"],
        ),
        (compressed("pack-quantized 4", config_groups={"W4A16": ["Linear"]}), ["config_groups.W4A16"]),
        (compressed(config_groups={}), ["config_groups is missing or empty"]),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), ["sparsity_config", "sparse-24-bitmask"]),
        (compressed(transform_config={"config_groups": {"R1": {}}}), ["transform_config"]),
        (compressed(ignore=["re:(a+)+$"]), ["ignore has the pattern '(a+)+$'"]),
        (compressed(ignore=["re:" + ".*" * 9]), ["ignore has the pattern"]),
        (compressed(ignore=["re:" + "x" * 2000]), ["2000 characters"]),
        (compressed(ignore="lm_head"), ["ignore is 'lm_head'"]),
    ],
)
def test_what_is_not_read_in_full_is_refused_by_name_and_value(config, words):
    with pytest.raises(CheckpointError) as error:
        read(config)
    for word in ("config.json: quantization_config.", *words):
        assert word in str(error.value)
