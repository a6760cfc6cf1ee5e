"""The grouped product at the sizes that models' experts have on the devices they are recommended for."""

import re
from itertools import permutations

import pytest

SIZES = {
    "v4: Mixtral-8x7B on 8": {"num_experts": 8, "k": 2, "embed": 4096, "mlp": 1792},
    "v6e: Mixtral-8x7B on 16": {"num_experts": 8, "k": 2, "embed": 4096, "mlp": 896},
    "v5e: Llama-4-Scout on 16": {"num_experts": 16, "k": 1, "embed": 5120, "mlp": 512},
    "v6e: Qwen3-30B-A3B on 4": {"num_experts": 128, "k": 8, "embed": 2048, "mlp": 192},
    "v5e: gpt-oss-20b on 4": {"num_experts": 32, "k": 4, "embed": 2880, "mlp": 720},
}


@pytest.mark.parametrize("model", SIZES)
def test_experts_are_two_kernels_that_take_the_weights_as_they_lie(compiler, model):
    sizes = SIZES[model]
    compiled = compiler.compile("tests.tpu.kernels.experts", model.partition(":")[0], tokens=256, **sizes)
    assert sum("gmm" in name for name in compiled.kernels) == 2, compiled.kernels
    shapes = "|".join(f"{a},{b}" for a, b in permutations((sizes["embed"], sizes["mlp"], 2 * sizes["mlp"]), 2))
    # What brings them to a chip's own memory ahead of time is a copy too, but one that has a start.
    weights = rf"= bf16\[{sizes['num_experts']},(?:{shapes})\][^ ]* (?:copy|transpose|fusion)\("
    made = [line[:200] for line in compiled.text.splitlines() if re.search(weights, line)]
    assert not made, "weights are copied in every step"
