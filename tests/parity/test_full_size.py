"""Every catalogued model at full size: the weights we declare are those that transformers saves, tensor by tensor."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from hex_llm.catalog.entry import config_of
from hex_llm.catalog.index import ENTRIES
from hex_llm.loader.checkpoint import Checkpoint
from hex_llm.loader.config_json import parse_config
from hex_llm.loader.text_part import text_part
from hex_llm.models.arch import Arch
from hex_llm.models.registry import family
from hex_llm.models.weights import specs
from hex_llm.safetensors_file import LazyTensor

type Shapes = Mapping[str, tuple[int, ...]]


def declared(arch: Arch) -> Shapes:
    """The tensors of a checkpoint that the model's family calls for."""
    weights = [spec.tensors(arch) for spec in specs(family(arch).weights, arch)]
    shapes = {name: shape for tensors in weights for name, shape in tensors.items()}
    assert len(shapes) == sum(map(len, weights)), "a tensor is declared twice"
    return shapes


def of_text(saved: Shapes) -> Shapes:
    """What of a checkpoint that also has a vision tower is loaded, by the names under which it is."""
    tensors = {name: LazyTensor(name, Path(), shape, np.dtype(np.float32), 0) for name, shape in saved.items()}
    return {name: tensor.shape for name, tensor in text_part(Checkpoint(Path(), tensors)).items()}


def differences(ours: Shapes, theirs: Shapes) -> list[str]:
    names = sorted(ours.keys() | theirs.keys())
    return [f"{each}: {ours.get(each)}, not {theirs.get(each)}" for each in names if ours.get(each) != theirs.get(each)]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_declared_weights_are_those_of_transformers_and_as_many_as_published(entry, oracle):
    config = config_of(entry)
    config.pop("quantization_config", None)  # how weights are kept changes neither their names nor their shapes
    arch = parse_config(config, entry.name).arch
    ours, theirs = declared(arch), oracle.shapes(config)
    found = differences(ours, of_text(theirs) if family(arch).multimodal else theirs)
    assert not found, f"{len(found)} tensors differ: {found[:5]}"
    assert sum(map(math.prod, ours.values())) == entry.parameters
