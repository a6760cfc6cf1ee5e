"""The TPU compiler itself: that it compiles for several devices, and refuses what a TPU would."""

import pytest

from hex_llm.parallel.collectives import collectives
from tests.tpu.compiler import RefusedError


def test_a_split_product_is_compiled_with_its_collective_and_its_memory(compiler):
    compiled = compiler.compile("tests.tpu.programs.product", "v5e:2x2", rows=1024, columns=4096)
    assert compiled.argument_bytes == 2 * (1024 + 4096) * 4096 // 4
    assert "all-reduce" in compiled.text
    assert compiled.kernels == ()


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_any_number_of_a_machines_chips_can_share_a_model(compiler, count):
    """Also one of chips that make no rectangle."""
    compiled = compiler.compile("tests.tpu.programs.sums", "v5e:2x4", count=count)
    assert [each.group for each in collectives(compiled.text)] == [count]


def test_a_program_that_no_chip_has_the_memory_for_is_refused(compiler):
    with pytest.raises(RefusedError, match="memory"):
        compiler.compile("tests.tpu.programs.product", "v5e", rows=8, columns=100_000)
