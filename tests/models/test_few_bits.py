"""What of an mlp devices have, where weights are in few bits."""

import pytest

from hex_llm.catalog.entry import config_of
from hex_llm.catalog.index import find
from hex_llm.loader.config_json import parse_config
from hex_llm.models.arch import Arch
from hex_llm.models.few_bits import MOST_FILLED, UNITS, in_units
from hex_llm.models.split import Split
from hex_llm.quantization.online import online
from tests.checkpoints import llama_config

FEW_BITS = online("int4")


def catalogued(name: str) -> Arch:
    entry = find(name)
    assert entry is not None
    return parse_config(config_of(entry), name).arch


def shares(arch: Arch, num_devices: int) -> list[int]:
    """Columns of the mlp that each device has, without those that only fill it up."""
    split = Split(in_units(arch, FEW_BITS, num_devices), num_devices)
    found = [sum(run.stop - run.start for run in split.runs("mlp", device)) for device in range(num_devices)]
    assert sum(found) == arch.mlp_size
    return found


def tiny(mlp: int, **changes) -> Arch:
    return parse_config(llama_config(intermediate_size=mlp, **changes), "config.json").arch


def experts(mlp: int) -> Arch:
    return tiny(mlp, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4)


def test_every_device_has_as_much_of_small_experts():
    assert shares(catalogued("Qwen/Qwen3-30B-A3B"), 4) == [192] * 4
    assert shares(catalogued("Qwen/Qwen3-30B-A3B"), 2) == [384] * 2


def test_an_mlp_that_devices_do_not_divide_into_tiles_is_filled_up():
    assert shares(catalogued("meta-llama/Llama-2-7b-hf"), 8) == [11 * 128] * 7 + [9 * 128]
    assert shares(catalogued("meta-llama/Llama-2-7b-hf"), 2) == [43 * 128] * 2


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("mlp", [600, 1000, 8960, 11008, 13696, 18944])
def test_no_more_is_filled_up_than_is_worth_it_and_the_unit_is_the_largest_so(mlp, num_devices):
    arch = in_units(tiny(mlp), FEW_BITS, num_devices)
    split = Split(arch, num_devices)
    filled = {unit: -(-mlp // (unit * num_devices)) * unit * num_devices / mlp for unit in UNITS}
    fit = [unit for unit in UNITS if filled[unit] <= MOST_FILLED]
    assert arch.mlp_unit == max(fit, default=2)
    assert split.size("mlp") <= MOST_FILLED * mlp
    assert split.shard("mlp") % arch.mlp_unit == 0
    assert all(shares(tiny(mlp), num_devices))


@pytest.mark.parametrize(
    ("arch", "num_devices", "expected"),
    [
        (tiny(24), 2, [12, 12]),  # an even number, so that 4 bits lie in whole bytes
        (tiny(20), 8, [4, 4, 4, 4, 4, 0, 0, 0]),
        (tiny(30), 4, [8, 8, 8, 6]),
        (experts(48), 4, [12, 12, 12, 12]),
        (experts(20), 4, [6, 6, 6, 2]),
    ],
)
def test_an_mlp_smaller_than_tiles_is_cut_all_the_same(arch, num_devices, expected):
    assert shares(arch, num_devices) == expected


@pytest.mark.parametrize(("quantization", "num_devices"), [(None, 4), (FEW_BITS, 1)])
def test_nothing_is_filled_up_in_many_bits_or_on_one_device(quantization, num_devices):
    assert in_units(tiny(100), quantization, num_devices).mlp_unit == 1
