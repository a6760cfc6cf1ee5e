"""The grouped product at the sizes that models' experts have on the devices they are recommended for."""

import re
from itertools import permutations

import pytest

SIZES = {
    "Mixtral-8x7B on 8": {"num_experts": 8, "chosen": 2, "width": 4096, "size": 1792},
    "Mixtral-8x7B on 16": {"num_experts": 8, "chosen": 2, "width": 4096, "size": 896},
    "Llama-4-Scout on 16": {"num_experts": 16, "chosen": 1, "width": 5120, "size": 512},
    "Qwen3-30B-A3B on 4": {"num_experts": 128, "chosen": 8, "width": 2048, "size": 192},
    "gpt-oss-20b on 4": {"num_experts": 32, "chosen": 4, "width": 2880, "size": 720, "bias": True},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_experts_are_two_kernels_that_take_the_weights_as_they_lie(compiler, sizes):
    compiled = compiler.compile("tests.tpu.experts.experts", "v5e", tokens=256, **sizes)
    assert sum("gmm" in name for name in compiled.kernels) == 2, compiled.kernels
    shapes = "|".join(f"{a},{b}" for a, b in permutations((sizes["width"], sizes["size"], 2 * sizes["size"]), 2))
    # What brings them to a chip's own memory ahead of time is a copy too, but one that has a start.
    weights = rf"= bf16\[{sizes['num_experts']},(?:{shapes})\][^ ]* (?:copy|transpose|fusion)\("
    made = [line[:200] for line in compiled.text.splitlines() if re.search(weights, line)]
    assert not made, "weights are copied in every step"
