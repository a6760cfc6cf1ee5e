import json

import pytest

from hex_llm.errors import CheckpointError
from hex_llm.kernels.rms import Rms
from hex_llm.layers.rope import LinearScaling, Llama3Scaling, Rope
from hex_llm.loader.config_json import parse_config, read_config
from hex_llm.models.arch import Kind
from tests.checkpoints import llama_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA = {"hidden_act": None}


def parse(**changes):
    return parse_config(llama_config(**changes), "config.json")


def refusal(**changes):
    with pytest.raises(CheckpointError) as caught:
        parse(**changes)
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


def test_optional_fields_have_the_defaults_of_transformers():
    absent = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "hidden_act", "torch_dtype")
    config = parse(**dict.fromkeys((*absent, "tie_word_embeddings")))
    arch = config.arch
    assert (arch.num_kv_heads, arch.head_dim, arch.rms) == (8, 8, Rms(1e-6))
    assert (arch.kinds, arch.tied, config.dtype) == ((Kind(Rope(8, 10000.0)),) * 2, False, None)
    assert (arch.qkv_bias, arch.o_bias, arch.mlp_bias) == (False, False, False)


def windows(architecture, **fields):
    """Of the two layers; None is a field's own value here, which `llama_config` would leave out."""
    config = parse_config(llama_config(architectures=[architecture]) | fields, "config.json")
    return [kind.window and kind.window.size for kind in config.arch.kinds]


def test_mistral_s_window_is_what_the_file_says_and_null_is_none():
    assert windows("MistralForCausalLM", sliding_window=100) == [100, 100]
    assert windows("MistralForCausalLM", sliding_window=None) == [None, None]
    assert windows("MistralForCausalLM") == [4096, 4096]


def test_qwen2_has_biases_on_queries_keys_and_values_and_uses_its_window_only_if_told_so():
    arch = parse(architectures=["Qwen2ForCausalLM"]).arch
    assert (arch.qkv_bias, arch.o_bias, arch.mlp_bias) == (True, False, False)

    def qwen2(**fields):
        return windows("Qwen2ForCausalLM", sliding_window=100, **fields)

    assert qwen2(use_sliding_window=False, max_window_layers=1) == [None, None]
    assert qwen2(use_sliding_window=True, max_window_layers=0) == [100, 100]
    assert qwen2(use_sliding_window=True, max_window_layers=1) == [None, 100]
    assert qwen2(use_sliding_window=True) == [None, None]  # none of two layers is past 28
    assert windows("Qwen2ForCausalLM", sliding_window=None, use_sliding_window=True) == [None, None]
    assert qwen2(layer_types=["full_attention"] * 2) == [None, None]
    mixed = {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]}
    assert "layer_types is not one of full_attention for each of the 2 layers" in refusal(**mixed)


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, more than the 8 experts"),
        ("MixtralForCausalLM", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1]}, "mlp_only_layers names layers"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok is 8"),
        ("Gemma2ForCausalLM", {"hidden_act": None, "layer_types": ["full_attention"]}, "layer_types is not one of"),
        ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "hidden_act"),
        ("Gemma2ForCausalLM", {"hidden_act": None, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("Gemma3ForCausalLM", GEMMA | {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.rope_type is not"),
        ("Gemma3ForCausalLM", GEMMA | {"rope_parameters": {}, "rope_scaling": {}}, "rope_scaling is there beside"),
        ("Gemma3ForConditionalGeneration", {}, "text_config is missing"),
        ("Gemma3ForConditionalGeneration", {"text_config": {"hidden_size": 0}}, "text_config.hidden_size is 0"),
        ("Llama4ForConditionalGeneration", {"text_config": {"vocab_size": 8}}, "text_config.hidden_size is missing"),
        ("Llama4ForCausalLM", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step is 2"),
        ("Llama4ForCausalLM", {"moe_layers": [1]}, "moe_layers does not name all of the 2 layers"),
        ("Llama4ForCausalLM", {"attn_temperature_tuning": "on"}, "attn_temperature_tuning is 'on'"),
        ("Llama4ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers is not 0 or 1 for each of the 2 layers"),
        ("GptOssForCausalLM", {"swiglu_limit": 3}, "swiglu_limit is 3"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.75, "rope_scaling": {"type": "default"}}, "partial_rotary"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.75}, "partial_rotary_factor is not 1"),
    ],
)
def test_what_a_family_cannot_be_is_named(architecture, changes, words):
    assert words in refusal(architectures=[architecture], **changes)


def test_a_stretched_context_counts_as_a_model_s_own():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert parse(rope_scaling=yarn, max_position_embeddings=512).arch.max_position == 2048
    assert parse(rope_scaling=yarn, max_position_embeddings=4096).arch.max_position == 4096


def test_llama4_s_temperature_is_on_unless_the_file_says_otherwise_and_4_is_how_the_first_files_say_it():
    def temperature(**fields):
        return parse(architectures=["Llama4ForCausalLM"], moe_layers=[0, 1], **fields).arch.temperature

    assert temperature() == temperature(attn_temperature_tuning=4) == (0.1, 8192)
    assert temperature(attn_temperature_tuning=False) is None


def test_both_ropes_of_gemma3_are_read_in_every_spelling():
    expected = (Rope(8, 20.0), Rope(8, 30.0, LinearScaling(8.0)))
    scaling, thetas = {"rope_type": "linear", "factor": 8.0}, {"rope_theta": 30.0, "rope_local_base_freq": 20.0}
    gemma3 = {**GEMMA, "architectures": ["Gemma3ForCausalLM"], "head_dim": 8, "sliding_window_pattern": 2}
    assert parse(**gemma3, **thetas, rope_scaling=scaling).arch.ropes == expected
    apart = {"full_attention": scaling | {"rope_theta": 30.0}, "sliding_attention": {"rope_theta": 20.0}}
    assert parse(**gemma3, rope_theta=None, rope_parameters=apart).arch.ropes == expected
    assert parse(**gemma3, **thetas, rope_parameters={"full_attention": scaling}).arch.ropes == expected


@pytest.mark.parametrize(("fields", "expected"), [({}, 4096), ({"original_max_position_embeddings": 100}, 100)])
def test_phi3_s_ropes_are_switched_where_the_file_or_else_transformers_says(fields, expected):
    scaling = {"type": "longrope", "short_factor": [1] * 4, "long_factor": [2] * 4}
    arch = parse(architectures=["Phi3ForCausalLM"], max_position_embeddings=8192, rope_scaling=scaling, **fields).arch
    assert arch.rope_switch == expected


def test_how_weights_are_kept_is_read_beside_the_architecture():
    config = parse(architectures=["GptOssForCausalLM"], quantization_config={"quant_method": "mxfp4"})
    assert config.arch.activation == "clamped_silu"
    assert config.quantization is not None
    assert config.quantization.name == "mxfp4"
    assert parse().quantization is None


def test_smollm3_rotates_in_the_layers_marked_1_or_in_all_but_every_fourth():
    def rotated(**fields):
        kinds = parse(architectures=["SmolLM3ForCausalLM"], **fields).arch.kinds
        return [kind.rope is not None for kind in kinds]

    assert rotated(num_hidden_layers=9) == [True, True, True, False, True, True, True, False, True]
    assert rotated(num_hidden_layers=4, no_rope_layer_interval=2) == [True, False, True, False]
    assert rotated(no_rope_layers=[0, 1, 1]) == [False, True]  # the list may be longer than the model
    said = refusal(architectures=["SmolLM3ForCausalLM"], no_rope_layers=[1])
    assert "no_rope_layers is not 0 or 1 for each of the 2 layers" in said
    assert "no_rope_layers" in refusal(architectures=["SmolLM3ForCausalLM"], no_rope_layers=[1, 2])


def test_smollm3_has_the_defaults_of_its_own_class():
    absent = dict.fromkeys(("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"))
    arch = parse(architectures=["SmolLM3ForCausalLM"], **absent).arch
    assert (arch.num_kv_heads, arch.rms, arch.ropes, arch.tied) == (4, Rms(1e-6), (Rope(8, 2e6),), True)


def test_smollm3_s_window_is_for_layers_that_do_not_rotate_and_used_only_if_told_so():
    def smollm3(**fields):
        return windows("SmolLM3ForCausalLM", sliding_window=100, no_rope_layers=[0, 1], **fields)

    assert smollm3() == [None, None]
    assert smollm3(use_sliding_window=True) == [100, None]
    assert smollm3(use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]) == [None, 100]
    assert windows("SmolLM3ForCausalLM", sliding_window=None, use_sliding_window=True) == [None, None]


def test_an_arch_can_be_a_key():
    assert {parse().arch: 1}[parse().arch] == 1


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, None),
        ({"factor": 2}, LinearScaling(2.0)),
        (LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    ],
    ids=["default", "linear", "llama3"],
)
def test_rope_is_read_in_every_spelling(scaling, expected):
    kind = {0: "default", 1: "linear", 4: "llama3"}[len(scaling)]
    rope = Rope(8, 5e5, expected)
    new = {"rope_type": kind, "rope_theta": 5e5, **scaling}
    assert parse(rope_theta=None, rope_parameters=new).arch.ropes == (rope,)
    assert parse(rope_theta=500000, rope_scaling={"rope_type": kind, **scaling}).arch.ropes == (rope,)
    assert parse(rope_theta=5e5, rope_scaling={"type": kind, **scaling}).arch.ropes == (rope,)
    both = parse(rope_theta=5e5, rope_scaling={"type": kind, **scaling}, rope_parameters=new)
    assert both.arch.ropes == (rope,)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_is_read_in_both_spellings(name):
    assert parse(**{"torch_dtype": None, name: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "architectures",
    ],
)
def test_a_missing_field_is_named(name):
    assert refusal(**{name: None}) == f"config.json: {name} is missing."


@pytest.mark.parametrize("value", ["64", 0, -8, 64.0, True, [64], {}, 2**40, pytest.param(10**5000, id="huge")])
def test_a_size_that_is_none_is_named(value):
    message = refusal(hidden_size=value)
    assert message.startswith("config.json: hidden_size is ")
    assert ", not a" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"hidden_size": 65}, "hidden_size is 65"),
        ({"num_attention_heads": 100, "num_key_value_heads": 100}, "hidden_size is 64"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not a number from 1 to 1024"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rope_theta": 10**400}, "rope_theta is a huge number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', not true or false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_act": 3}, "hidden_act is 3"),
        ({"torch_dtype": "int4"}, "torch_dtype is 'int4'"),
        ({"architectures": []}, "architectures is not a list of names"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is not a list of names"),
        ({"architectures": ["BertModel"]}, "'BertModel', and the decoders served are Llama, SmolLM3, Mistral"),
        ({"quantization_config": {"quant_method": "marvel"}}, "quantization_config.quant_method is 'marvel'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 3}}, "quantization_config.bits is 3"),
        ({"quantization_config": 8}, "quantization_config is 8, not an object"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.type is 'dynamic'; this version has"),
        ({"rope_parameters": {"rope_type": "magic"}}, "rope_parameters.rope_type is 'magic'; this version has"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_slow": 40}}, "rope_scaling.beta_slow is above beta_fast"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e300}}, "rope_scaling makes a context of 5.12e+302 tokens"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor is missing"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1] * 4, "long_factor": [1] * 3}},
            "rope_scaling.long_factor is not a list of 4 numbers",
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1] * 4, "long_factor": [1, 2, 3, 0]}},
            "rope_scaling.long_factor is 0",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor is -1"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": None}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 5}}, "low_freq_factor is above"),
        ({"rope_scaling": [1]}, "rope_scaling is [1], not an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
            "different things",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_a_value_that_cannot_be_served_is_named(changes, words):
    message = refusal(**changes)
    assert message.startswith("config.json: ")
    assert words in message


def test_a_long_value_makes_no_long_message():
    refusal(hidden_size="x" * 100_000)
    refusal(architectures=["x" * 100_000])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b'{"hidden_size": 64', "not valid JSON"),
        (b'{"rms_norm_eps": NaN}', "NaN is not a JSON number"),
        (b'{"rms_norm_eps": -Infinity}', "Infinity is not a JSON number"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "web page"),
    ],
    ids=range(11),
)
def test_a_damaged_file_is_named(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "config.json") in message
    assert words in message
    assert len(message) < 400


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_config(tmp_path)


def test_a_config_is_read_from_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    assert read_config(tmp_path) == parse()
