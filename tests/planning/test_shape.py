"""Sizes read from a config alone are those of the weights that families declare."""

import pytest

from hex_llm.bench.roofline import weight_sizes
from hex_llm.catalog.entry import config_of
from hex_llm.catalog.index import ENTRIES
from hex_llm.errors import CheckpointError
from hex_llm.kernels.quant_matmul.weight import W4A8_COLUMNS
from hex_llm.loader.config_json import parse_config
from hex_llm.models.split import Split
from hex_llm.planning import precision
from hex_llm.planning.memory import heads_on
from hex_llm.planning.precision import BITS, has_rounded_tokens, read_precision
from hex_llm.planning.shape import read_shape
from hex_llm.quantization.narrow_tokens import NarrowTokens
from tests.quantization.test_formats import MODULE, format_of, method_of
from tests.quantization.writers import KINDS


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_shape_is_that_of_the_weights(entry):
    shape, arch = read_shape(entry.config, entry.name), parse_config(config_of(entry), entry.name).arch
    sizes = weight_sizes(arch, 1)
    # Norms and biases are left out.
    assert shape.dense == pytest.approx(sizes.dense, rel=0.003)
    assert shape.routed == pytest.approx(sizes.experts, rel=0.001)
    assert shape.head == sizes.head
    assert shape.parameters == pytest.approx(entry.parameters, rel=0.003)
    assert shape.context == entry.context
    assert shape.windows == tuple(None if kind.window is None else kind.window.size for kind in arch.kinds)
    for devices in (1, 2, 4, 8, 16):
        split = Split(arch, devices)
        assert heads_on(shape, devices) == (split.heads, split.kv_heads)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_bits_are_those_of_the_catalog(entry):
    assert int(BITS[read_precision(entry.config, entry.name)]) == entry.bits


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_taken_to_be_rounded_where_the_server_rounds_them(name):
    kind = KINDS[name]
    coding = format_of(kind).coding
    of_4_bits = {"nf4": "int4", "fp4": "int4"}
    assert read_precision({"quantization_config": kind.config}, name) == of_4_bits.get(coding, coding)


@pytest.mark.parametrize("name", [name for name in KINDS if format_of(KINDS[name]).coding in ("int4", "nf4", "fp4")])
def test_tokens_can_be_rounded_in_a_plan_where_the_server_can(name):
    narrow = NarrowTokens(method_of(KINDS[name])).format(MODULE)
    assert narrow is not None
    assert has_rounded_tokens({"quantization_config": KINDS[name].config}, name) == (narrow.coding == "w4a8")


def test_groups_of_columns_that_plans_know_are_the_kernels():
    assert precision.NARROW_COLUMNS == W4A8_COLUMNS


@pytest.mark.parametrize("group", ["128", 0.5, [128]])
def test_a_group_that_is_no_number_is_named(group):
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": group}}
    with pytest.raises(CheckpointError, match=r"quantization_config\.group_size is .*, not a whole number"):
        has_rounded_tokens(config, "config.json")
