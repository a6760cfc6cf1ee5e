"""Numbers that are none, in a checkpoint's tensors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hex_llm.errors import CheckpointError
from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.loader.config_json import read_config
from hex_llm.loader.values import Check, check_finite
from hex_llm.loader.weights import load
from hex_llm.models.llama import Llama
from hex_llm.parallel.mesh import make_mesh
from tests.checkpoints import write_llama
from tests.quantization.writers import KINDS, write

TENSOR: Any = SimpleNamespace(name="w", path=Path("model.safetensors"))
NAMED = r"Tensor w in model\.safetensors holds NaN or infinity"
UP = "model.layers.1.mlp.up_proj.weight"


def float8(*codes: int) -> np.ndarray:
    return np.array([codes], np.uint8).view(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("check", ["sample", "full"])
def test_a_nan_of_float8_is_found_with_either_sign(code: int, check: Check):
    with pytest.raises(CheckpointError, match=NAMED):
        check_finite(TENSOR, float8(0x00, 0x31, code), check)
    check_finite(TENSOR, float8(0x00, 0x31, code), "off")


@pytest.mark.parametrize("check", ["sample", "full"])
def test_every_other_code_of_float8_is_a_number(check: Check):
    check_finite(TENSOR, float8(*(code for code in range(256) if code & 0x7F != 0x7F)), check)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_wider_numbers_that_are_none_are_found(value: float):
    for kind in (np.float32, np.float16, ml_dtypes.bfloat16):
        with pytest.raises(CheckpointError, match=NAMED):
            check_finite(TENSOR, np.array([[0, value]]).astype(kind), "full")


def test_a_sample_of_a_large_tensor_passes_over_rows_and_a_full_check_does_not():
    values = np.zeros((4, 1 << 16), np.uint8)
    values[1, 5] = 0x7F
    piece = values.view(ml_dtypes.float8_e4m3fn)
    check_finite(TENSOR, piece, "sample")
    with pytest.raises(CheckpointError, match=NAMED):
        check_finite(TENSOR, piece, "full")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("check", ["sample", "full"])
def test_a_model_in_float8_with_a_nan_is_refused_by_the_name_of_the_tensor(code: int, check: Check, tmp_path):
    source = write_llama(tmp_path / "source", hidden_size=64, intermediate_size=128)
    folder = write(source, tmp_path / "few", KINDS["fp8 dynamic"])
    damage(folder, code)
    config = read_config(folder)

    def loaded(check: Check):
        checkpoint = open_checkpoint(folder)
        return load(
            Llama, config.arch, checkpoint, make_mesh(1), jnp.float32, quantization=config.quantization, check=check
        )

    loaded("off")
    with pytest.raises(CheckpointError, match=rf"{UP} in .*model\.safetensors holds NaN"):
        loaded(check)


def damage(folder: Path, code: int) -> None:
    """One number of a weight."""
    tensors = {name: np.asarray(tensor[()]) for name, tensor in open_checkpoint(folder).items()}
    weight = np.array(tensors[UP])
    weight.view(np.uint8)[77, 3] = code
    save_file(tensors | {UP: weight}, folder / "model.safetensors", {"format": "pt"})
