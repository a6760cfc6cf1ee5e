"""What is taken of a checkpoint that also has a vision tower."""

import logging
from pathlib import Path

import numpy as np
import pytest

from hex_llm.loader.checkpoint import Checkpoint
from hex_llm.loader.text_part import text_part
from hex_llm.safetensors_file import LazyTensor


def checkpoint(*names):
    tensors = [LazyTensor(name, Path("model.safetensors"), (2, 3), np.dtype(np.float32), 0) for name in names]
    return Checkpoint(Path(), {tensor.name: tensor for tensor in tensors})


@pytest.mark.parametrize(
    "names",
    [
        ["language_model.model.norm.weight", "language_model.lm_head.weight"],
        ["model.language_model.norm.weight", "lm_head.weight"],
        ["model.norm.weight", "lm_head.weight"],
    ],
)
def test_the_language_model_is_found_under_every_name(names):
    found = text_part(checkpoint(*names, "vision_tower.embed.weight"))
    assert set(found) == {"model.norm.weight", "lm_head.weight"}


def test_what_belongs_to_images_is_left_out_and_that_is_said(caplog):
    images = ["vision_tower.a", "model.vision_tower.b", "vision_model.c", "multi_modal_projector.d"]
    with caplog.at_level(logging.WARNING):
        assert set(text_part(checkpoint("model.norm.weight", *images))) == {"model.norm.weight"}
    (record,) = caplog.records
    assert "Only text is served: 4 tensors of the vision tower" in record.getMessage()


def test_nothing_is_said_where_there_is_nothing_to_leave_out(caplog):
    text_part(checkpoint("model.norm.weight"))
    assert not caplog.records
