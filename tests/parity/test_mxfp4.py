"""gpt-oss in MXFP4, as it is published, against transformers on what the numbers stand for."""

import json
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.parity.test_logits import TOKENS, load_model, logits_of
from tests.quantization import decoders


def random_blocks(experts=2, rows=6, groups=3, seed=0):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, rows, groups, 16), dtype=np.uint8)
    return blocks, rng.integers(110, 140, (experts, rows, groups), dtype=np.uint8)


def decoded(blocks, scales):
    """[experts, in, out], as an unquantized checkpoint has it."""
    return np.ascontiguousarray(decoders.mxfp4(blocks, scales).swapaxes(1, 2))


def test_the_tests_decoder_is_that_of_transformers(oracle):
    blocks, scales = random_blocks(seed=1)
    np.testing.assert_array_equal(oracle.mxfp4(blocks, scales), decoded(blocks, scales))


def test_logits_of_a_model_in_mxfp4_equal_those_of_the_widened_one(oracle, many_devices, tmp_path):
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for folder in (plain, packed):
        shutil.copytree(oracle.make("gpt-oss"), folder)
    tensors = load_file(plain / "model.safetensors")
    narrow = dict(tensors)
    for seed, name in enumerate(sorted(name for name in tensors if name.endswith(("gate_up_proj", "down_proj")))):
        experts, columns, rows = tensors[name].shape
        blocks, scales = random_blocks(experts, rows, columns // 32, seed)
        scales = scales % 4 + 121  # of the size that weights have
        tensors[name] = decoded(blocks, scales).astype(np.float32)
        del narrow[name]
        narrow |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(narrow, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    expected = oracle.logits(plain, TOKENS)
    for found in (logits_of(*load_model(packed)), many_devices.logits(packed, 2)):
        assert np.abs(found - expected).max() <= 1e-4 * np.ptp(expected)
