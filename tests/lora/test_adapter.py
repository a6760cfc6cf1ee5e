"""What an adapter adds to each module, and everything that is refused before any of it is used."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hex_llm.errors import AdapterError
from hex_llm.lora import files
from hex_llm.lora.adapter import open_adapter
from tests.lora.adapters import (
    HEADS,
    HIDDEN,
    MODULES,
    Q0,
    peft_config,
    random_pairs,
    tensors_of,
    write_adapter,
    write_good,
)

MAX_RANK = 8
V1 = "model.layers.1.self_attn.v_proj"


def read(folder):
    return open_adapter(folder, MODULES, MAX_RANK).read()


def refusal(folder):
    with pytest.raises(AdapterError) as caught:
        read(folder)
    assert (caught.value.status, caught.value.code) == (400, "adapter_invalid")
    assert "\n" not in str(caught.value)
    assert str(folder) not in str(caught.value), "where it lies here is nobody's business"
    return str(caught.value)


def check(found, pairs, scaling):
    assert set(found) == set(pairs)
    for name, (a, b) in pairs.items():
        np.testing.assert_array_equal(found[name][0], a.astype(np.float32))
        np.testing.assert_allclose(found[name][1], b.astype(np.float32) * np.float32(scaling), rtol=1e-6)
        assert {half.dtype for half in found[name]} == {np.dtype(np.float32)}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_and_b_are_what_was_written_times_the_scaling(tmp_path, dtype):
    pairs = random_pairs(*MODULES, dtype=dtype)
    check(read(write_adapter(tmp_path, peft_config(lora_alpha=6), tensors_of(pairs))), pairs, 6 / 4)


def test_rank_stabilized_is_divided_by_the_root(tmp_path):
    pairs = random_pairs(Q0)
    check(read(write_adapter(tmp_path, peft_config(use_rslora=True, lora_alpha=6), tensors_of(pairs))), pairs, 6 / 2)


def test_some_modules_of_some_layers_are_enough(tmp_path):
    pairs = random_pairs(Q0, V1)
    check(read(write_adapter(tmp_path, peft_config(), tensors_of(pairs))), pairs, 2)


def test_modules_have_ranks_and_alphas_of_their_own(tmp_path):
    names = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qv"]
    ranks = dict(zip(names, [4, 2, 8, 1], strict=True))
    pairs = {name: random_pairs(name, rank=rank)[name] for name, rank in ranks.items()}
    config = peft_config(
        # The first that matches counts, and a name matches from a dot on.
        rank_pattern={"layers.0.self_attn.v_proj": 2, "v_proj": 1, "1.self_attn.q_proj": 8, "_proj": 5},
        alpha_pattern={names[2]: 3},
        use_rslora=True,
    )
    found = read(write_adapter(tmp_path, config, tensors_of(pairs)))
    for name, rank in ranks.items():
        alpha = 3 if name == names[2] else 8
        check({name: found[name]}, {name: pairs[name]}, alpha / np.sqrt(rank))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_a_model_that_sees_has_its_text_read(tmp_path, prefix, caplog):
    pairs = random_pairs(Q0, V1)
    tensors = tensors_of({name.replace("model.", prefix, 1): pair for name, pair in pairs.items()})
    images = tensors_of({"model.vision_tower.encoder.q_proj": random_pairs(Q0)[Q0]})
    config = peft_config(rank_pattern={f"{prefix}layers.0.self_attn.q_proj": 4}, r=4)
    check(read(write_adapter(tmp_path, config, tensors | images)), pairs, 2)
    assert "2 tensors of an adapter are for images" in caplog.text


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|v)_proj", None, [Q0, "v_proj"]])
def test_targets_may_be_told_in_other_ways(tmp_path, targets):
    pairs = random_pairs(Q0, V1)
    check(read(write_adapter(tmp_path, peft_config(target_modules=targets), tensors_of(pairs))), pairs, 2)


def test_tensors_may_lie_in_several_files_and_other_files_beside_them(tmp_path):
    pairs = random_pairs(*MODULES)
    write_adapter(tmp_path, peft_config(), tensors_of(pairs), num_files=3)
    (tmp_path / "adapter_model.bin").write_bytes(b"a pickle")
    save_file({"of.the.whole.model": np.zeros(3)}, tmp_path / "model.safetensors")
    check(read(tmp_path), pairs, 2)
    (tmp_path / "adapter_model-00002-of-00003.safetensors").unlink()
    assert "has 2 of the 3 files that adapter_model-00001-of-00003.safetensors is one of" in refusal(tmp_path)


def test_weights_may_have_any_name(tmp_path):
    write_good(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "weights.safetensors")
    assert set(read(tmp_path)) == set(MODULES)


@pytest.mark.parametrize(
    "name", ["adapter_model \n", "adapter_model\0", "adapter_model" + "x" * 200, "adapter_model\ud800"]
)
def test_weights_may_not_have_every_name(name):
    sizes = {"adapter_config.json": 3, f"{name}.safetensors": 3}
    with pytest.raises(AdapterError, match=r"names have letters, digits and \._=- only"):
        files.chosen(sizes, "source")


def test_fields_of_old_and_new_versions_that_change_nothing_are_no_reason_to_refuse(tmp_path):
    more = {"merge_weights": False, "enable_lora": None, "init_lora_weights": "gaussian", "ensure_weight_tying": True}
    more |= {"eva_config": {"rho": 2.0}, "layers_to_transform": [0], "qalora_group_size": 32}
    write_adapter(tmp_path, peft_config(**more), tensors_of(random_pairs(Q0)))
    assert set(read(tmp_path)) == {Q0}


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-7b-hf", "/home/somebody/base", "", None])
def test_what_the_base_model_is_called_is_no_reason_to_refuse(tmp_path, name):
    """It is called by where it lay when the adapter was trained, and a model lies in many places."""
    write_adapter(tmp_path, peft_config(base_model_name_or_path=name), tensors_of(random_pairs(Q0)))
    assert set(read(tmp_path)) == {Q0}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 9}, "r is 9, and ranks up to 8 are served (--max_lora_rank)"),
        ({"r": 0}, "r is 0, not a number from 1 to 8"),
        ({"r": -8}, "r is -8, not a number from 1 to 8"),
        ({"r": "4"}, "r is '4', not a whole number"),
        ({"r": 4.0}, "r is 4.0, not a whole number"),
        ({"r": True}, "r is True, not a whole number"),
        ({"r": 10**400}, "r is a huge number, not a number from 1 to 8"),
        ({"r": None}, "r is missing"),
        ({"lora_alpha": 0}, "lora_alpha is 0, not a finite number above 0"),
        ({"lora_alpha": -1}, "lora_alpha is -1, not a finite number above 0"),
        ({"lora_alpha": "8"}, "lora_alpha is '8', not a number"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
        ({"lora_alpha": 1e300}, f"{Q0}.lora_B.weight times its scaling of 2.5e+299 is beyond bfloat16"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes', not true or false"),
        (
            {"rank_pattern": {"q_proj": 9}},
            "rank_pattern.q_proj is 9, and ranks up to 8 are served (--max_lora_rank)",
        ),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj is 0, not a number from 1 to 8"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is ['q_proj'], not an object"),
        ({"rank_pattern": {".*q_proj": 4}}, "rank_pattern has '.*q_proj', and only names of modules are read"),
        ({"alpha_pattern": {"(a+)+$": 4}}, "alpha_pattern has '(a+)+$', and only names of modules are read"),
        ({"alpha_pattern": {"": 4}}, "alpha_pattern has ''"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern.q_proj is 0, not a finite number above 0"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', not LORA"),
        ({"peft_type": None}, "peft_type is missing"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which is not supported"),
        ({"bias": "all"}, "bias is 'all', not none"),
        ({"bias": "lora_only"}, "bias is 'lora_only', not none"),
        ({"lora_bias": True}, "lora_bias is True, which is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True, which is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is [1], which is not supported"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters is ['mlp.experts'], which is not supported"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is [[0, 2], [1, 2]], which is not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is [1], which is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', not true, false, gaussian"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"init_lora_weights": 3}, "init_lora_weights is 3, not text"),
        ({"target_modules": {"q_proj": 1}}, "target_modules is {'q_proj': 1}, not a list of text"),
        ({"target_modules": ["k_proj"]}, f"does not have {Q0} in target_modules, and there are tensors for it"),
        ({"a_new_way": 0.5}, "a_new_way is 0.5, and what it means is not known"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_config_of_another_adapter_is_refused_by_the_field(tmp_path, fields, words):
    message = refusal(write_adapter(tmp_path, peft_config(**fields), tensors_of(random_pairs(Q0))))
    assert words in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "adapter_config.json is not valid JSON"),
        ("{", "adapter_config.json is not valid JSON"),
        ("[]", "adapter_config.json is not a JSON object"),
        ('{"r": NaN}', "adapter_config.json is not valid JSON"),
        ('{"r":' * 100_000, "adapter_config.json is not usable JSON: it is nested too deeply"),
        ("version https://git-lfs.github.com/spec/v1", "adapter_config.json is a Git LFS pointer"),
        (" " * 2**20 + "{}", "adapter_config.json of {name} has 1.05 MB; it may have 1.05 MB"),
    ],
    ids=range(7),
)
def test_what_is_no_json_is_told(tmp_path, text, words):
    write_adapter(tmp_path, text, tensors_of(random_pairs(Q0)))
    assert words.format(name=tmp_path.name) in refusal(tmp_path)


def written(name, shape=(4, HIDDEN), dtype=np.float32):
    return {name: np.zeros(shape, dtype)}


A, B = f"base_model.model.{Q0}.lora_A.weight", f"base_model.model.{Q0}.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "The adapter has no tensors for the language model"),
        (written("base_model.model.model.vision_tower.x.lora_A.weight"), "no tensors for the language model"),
        (written(A), f"has lora_A of {Q0}, and not the other half"),
        (written(B, (HEADS, 4)), f"has lora_B of {Q0}, and not the other half"),
        (written(A, (4, 32)) | written(B, (HEADS, 4)), f"{A} has shape [4, 32]; with rank 4, a module of 16 inputs"),
        (written(A) | written(B, (32, 4)), f"{B} has shape [32, 4]; with rank 4, a module of 16 inputs and 24 outputs"),
        (written(A, (5, HIDDEN)) | written(B, (HEADS, 5)), f"{A} has shape [5, 16]; with rank 4"),
        (written(A, (0, HIDDEN)) | written(B, (HEADS, 0)), f"{A} has shape [0, 16]; with rank 4"),
        (written(A, (HIDDEN, 4)) | written(B, (4, HEADS)), f"{A} has shape [16, 4]; with rank 4"),
        (written(A, (1, 4, HIDDEN)) | written(B), f"{A} has shape [1, 4, 16]; with rank 4"),
        (written(A, dtype=np.int8) | written(B, (HEADS, 4)), f"{A} has type int8; float16, bfloat16, float32 are read"),
        (written(A) | written(B, (HEADS, 4), np.float64), f"{B} has type float64; float16, bfloat16, float32 are read"),
        (written(A) | written(B, (HEADS, 4), ml_dtypes.float8_e4m3fn), f"{B} has type float8_e4m3fn"),
        (written("base_model.model.lm_head.lora_A.weight"), "also for lm_head, which is no module that is adapted"),
        (written("base_model.model.model.embed_tokens.lora_embedding_A"), "lora_embedding_A is no A or B of a LoRA"),
        (written("base_model.model.model.embed_tokens.weight"), "embed_tokens.weight is no A or B of a LoRA"),
        (written(A.replace("lora_A.weight", "lora_magnitude_vector")), "lora_magnitude_vector is no A or B of a LoRA"),
        (written(A.replace("weight", "bias")), "lora_A.bias is no A or B of a LoRA"),
        (written(A.replace("weight", "default.weight")), "lora_A.default.weight is no A or B of a LoRA"),
        (written(A.replace("self_attn.q", "mlp.experts.3.gate")), "also for model.layers.0.mlp.experts.3.gate_proj"),
        (written(A.replace("layers.0", "layers.2")), "also for model.layers.2.self_attn.q_proj"),
        (written(A.removeprefix("base_model.model.")), f"{Q0}.lora_A.weight is no A or B of a LoRA"),
        (written("\n" * 5000), "... is no A or B of a LoRA"),
        (
            written(A) | written(A.replace(".model.layers", ".model.language_model.layers")),
            "self_attn.q_proj.lora_A.weight are of the same module",
        ),
    ],
    ids=range(24),
)
def test_tensors_that_are_not_the_models_are_refused_by_name(tmp_path, tensors, words):
    message = refusal(write_adapter(tmp_path, peft_config(target_modules="all-linear"), tensors))
    assert words in message
    assert len(message) < 600


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_one_number_that_is_none_is_enough(tmp_path, half, value, dtype):
    pairs = random_pairs(Q0, V1, dtype=dtype)
    pairs[V1][half][-1, -1] = value
    write_adapter(tmp_path, peft_config(), tensors_of(pairs))
    assert f"base_model.model.{V1}.lora_{'AB'[half]}.weight holds NaN or infinity" in refusal(tmp_path)


def test_files_that_are_missing_or_of_another_kind_are_told(tmp_path):
    assert refusal(tmp_path / "none") == "none cannot be read: No such file or directory."
    assert "has no adapter_config.json" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_config()))
    assert "holds no *.safetensors file." in refusal(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"a pickle")
    assert "it has adapter_model.bin, a format that is not read" in refusal(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not what it says")
    assert "adapter_model.safetensors is cut short or is no safetensors file" in refusal(tmp_path)


def test_every_cut_of_the_weights_is_noticed(tmp_path):
    write_adapter(tmp_path, peft_config(), tensors_of(random_pairs(Q0)))
    path = tmp_path / "adapter_model.safetensors"
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        assert "cut short" in refusal(tmp_path)


def test_weights_that_are_cut_after_they_were_checked_are_noticed(tmp_path):
    adapter = open_adapter(write_good(tmp_path), MODULES, MAX_RANK)
    path = tmp_path / "adapter_model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors was cut short after it was checked"):
        adapter.read()
    path.unlink()
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors cannot be read any more"):
        adapter.read()


def test_too_large_and_too_many_are_known_before_anything_is_read(tmp_path):
    write_good(tmp_path)
    with (tmp_path / "adapter_model-2.safetensors").open("wb") as file:
        file.truncate(files.MOST_BYTES)
    assert "has 2.15 GB; an adapter may have 2.15 GB" in refusal(tmp_path)
    (tmp_path / "adapter_model-2.safetensors").unlink()
    for number in range(15):
        (tmp_path / f"adapter_model-{number}.safetensors").touch()
    assert "has 17 files; an adapter may have 16" in refusal(tmp_path)


def test_a_long_header_is_not_read(tmp_path):
    write_adapter(tmp_path, peft_config(), {})
    length = 9 * 2**20
    (tmp_path / "adapter_model.safetensors").write_bytes(length.to_bytes(8, "little") + b" " * length)
    assert "has a header of 9437184 bytes; at most 8388608 are read" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_may_not_leave_the_folder(tmp_path, name):
    folder = write_good(tmp_path / "adapter")
    (folder / "real").mkdir()
    (folder / name).rename(folder / "real" / name)
    (folder / name).symlink_to(f"real/{name}")
    assert set(read(folder)) == set(MODULES)
    (folder / "real" / name).rename(tmp_path / name)
    (folder / "real" / name).symlink_to(f"../../{name}")
    assert f"{name} of adapter is a link that leads out of the folder" in refusal(folder)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(write_good(tmp_path) / "adapter_model-2.safetensors")
    assert set(read(tmp_path)) == set(MODULES)
    (tmp_path / "adapter_config.json").unlink()
    os.mkfifo(tmp_path / "adapter_config.json")
    assert "has no adapter_config.json" in refusal(tmp_path)
