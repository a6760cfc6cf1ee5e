"""Every catalogued model at full size: the weights we declare are those that transformers saves, tensor by tensor."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from hex_llm.catalog.entry import Entry, config_of
from hex_llm.catalog.index import ENTRIES
from hex_llm.loader.config_json import parse_config
from hex_llm.models.registry import family
from hex_llm.models.weights import specs

# What a model has to see with, which is not loaded.
SIGHT = ("vision_tower.", "vision_model.", "multi_modal_projector.")


def declared(entry: Entry) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint that the model's family calls for, by name."""
    arch = parse_config(config_of(entry), entry.name).arch
    parts = [part for spec in specs(family(arch).weights, arch) for part in spec.parts]
    shapes = {part.name: part.shape(arch) for part in parts}
    assert len(shapes) == len(parts), "a tensor is declared twice"
    return shapes


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    names = sorted(ours.keys() | theirs.keys())
    return [f"{each}: {ours.get(each)}, not {theirs.get(each)}" for each in names if ours.get(each) != theirs.get(each)]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_declared_weights_are_those_of_transformers_and_as_many_as_published(entry, oracle):
    ours = declared(entry)
    saved = oracle.shapes(config_of(entry))
    found = differences(ours, {name: shape for name, shape in saved.items() if not name.startswith(SIGHT)})
    assert not found, f"{len(found)} tensors differ: {found[:5]}"
    assert sum(map(math.prod, ours.values())) == entry.parameters
