"""What the catalog says of its models, and that the page about them says the same."""

import json
from pathlib import Path

import pytest

from hex_llm.catalog.entry import config_of
from hex_llm.catalog.index import ENTRIES, find, near
from hex_llm.config import Config
from hex_llm.flags import flags_of
from hex_llm.models_cli import rounded

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
GIB = {"ct5lp-hightpu": 16, "ct6e-standard": 32, "a3-ultragpu": 131}  # of a device
FLAGS = {flag.name: flag for flag in flags_of(Config)}


def test_a_model_is_found_by_its_name_in_capitals_or_not():
    entry = find("meta-llama/Llama-3.1-8B")
    assert entry is not None
    assert (entry.parameters, entry.context, entry.architecture) == (8_030_261_248, 131072, "LlamaForCausalLM")
    assert find("META-LLAMA/llama-3.1-8b") is entry
    assert find("meta-llama/Llama-3.1-9B") is None
    assert len({entry.name.lower() for entry in ENTRIES}) == len(ENTRIES)


def test_the_models_nearest_to_a_name_are_offered():
    assert near("meta-llama/Llama3.1-8b")[0] == "meta-llama/Llama-3.1-8B"
    assert near("Mixtral-8x7b")[0] == "mistralai/Mixtral-8x7B-v0.1"
    assert near("/xyzzy/") == []


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_config_is_json_of_its_own(entry):
    config = config_of(entry)
    assert json.loads(json.dumps(config)) == config
    config["architectures"].append("changed")
    assert entry.config["architectures"] == [entry.architecture]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_recommended_settings_are_legal_and_have_room_for_the_weights(entry):
    assert entry.recommended
    for each in entry.recommended:
        assert {name: FLAGS[name].accept(value) for name, value in each.flags.items()} == each.flags
        assert each.flags.get("max_model_len", 1) <= entry.context
        kind, _, devices = each.machine.rpartition("-")
        in_all = int(devices[:-1]) * each.flags.get("num_hosts", 1)
        used = each.flags["tensor_parallel_size"] * Config(**each.flags).num_engines
        assert used == in_all, "no chip is left without work"
        assert entry.weight_bytes < each.flags["tensor_parallel_size"] * GIB[kind] * 2**30


def test_the_page_about_models_says_what_the_catalog_does():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{entry.name}` | {rounded(entry.parameters)} | {entry.context} | {entry.architecture}"
        f" | {', '.join(_machines(each) for each in entry.recommended)} |"
        for entry in ENTRIES
    ]


def _machines(recommended):
    hosts = recommended.flags.get("num_hosts", 1)
    return f"{hosts} x {recommended.machine}" if hosts > 1 else recommended.machine
