"""Machines that a plan takes, beside those of the catalog."""

import pytest

from hex_llm.catalog.index import ENTRIES
from hex_llm.catalog.machine_types import SLICES
from hex_llm.planning.model import read_model
from hex_llm.planning.placement import Demand, accelerators_of, copy_sizes, place

# Where the catalog has more than the sums ask for, and where it has less: there its length does not fit at its share.
LARGER = {"ct5lp-hightpu-1t": "ct5lp-hightpu-4t", "ct5lp-hightpu-4t": "ct5lp-hightpu-8t", "h200x4": "a3-ultragpu-8g"}
MORE_IN_THE_CATALOG = {
    "mistralai/Mistral-Small-24B-Base-2501",
    "mistralai/Mistral-Small-24B-Instruct-2501",
    "mistralai/Mixtral-8x22B-v0.1",
    "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "openai/gpt-oss-20b",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic",
}
LESS_IN_THE_CATALOG = {
    "microsoft/Phi-3-mini-128k-instruct",
    "microsoft/Phi-3-medium-128k-instruct",
    "Qwen/Qwen2-72B",
    "Qwen/Qwen2.5-72B",
}
RECOMMENDED = [
    (entry, each) for entry in ENTRIES for each in entry.recommended if "disagg_topo" not in each.flags
]  # those are in test_guides


@pytest.mark.parametrize(("entry", "recommended"), RECOMMENDED, ids=lambda each: getattr(each, "name", ""))
def test_the_machine_is_the_one_that_the_catalog_recommends(entry, recommended):
    flags, model = recommended.flags, read_model(entry.name, None, "auto")
    demand = Demand(1000, 1000, 64, flags["max_model_len"], flags["hbm_utilization_factor"])
    (accelerator,) = accelerators_of(recommended.machine)
    found = place(model, accelerator, demand)
    assert found is not None
    if entry.name in LESS_IN_THE_CATALOG:
        assert found.slice.devices == 2 * flags["tensor_parallel_size"]
    elif entry.name in MORE_IN_THE_CATALOG:
        assert LARGER[found.slice.machine] == recommended.machine
    else:
        assert (found.slice.machine, found.slice.hosts) == (recommended.machine, flags.get("num_hosts", 1))
        assert found.devices == flags["tensor_parallel_size"]


def test_a_copy_has_a_slice_of_its_own_or_shares_the_smallest():
    assert copy_sizes("v5e", apart=False) == [1, 4, 8, 16, 32, 64]
    assert copy_sizes("v5p", apart=False) == [1, 2, 4, 8, 16, 32]
    assert copy_sizes("v5e", apart=True)[:4] == [1, 2, 4, 8]


@pytest.mark.parametrize("accelerator", SLICES)
def test_slices_are_in_order_and_their_shapes_and_prices_are_of_their_devices(accelerator):
    slices = SLICES[accelerator]
    assert [each.devices for each in slices] == sorted({each.devices for each in slices})
    assert len({each.price_per_hour and each.price_per_hour / each.devices for each in slices}) == 1
    for each in slices:
        assert each.chip.name == accelerator
        per_host = each.devices // each.hosts
        chips = per_host // 2 if accelerator == "tpu7x" else per_host
        assert str(chips) in each.machine
