"""What the whole engine generates, against transformers' generate."""

import numpy as np
import pytest

from hex_llm.engine.request import SamplingParams
from tests.parity.variants import VARIANTS
from tests.runner.engines import make_engine, run, tokens

LLAMAS = ["multi-head", "theta-1e6", "rope-linear", "rope-llama3-8", "rope-yarn", "wide-heads", "biased"]
OTHERS = [
    "mistral-window",
    "qwen2-tied-odd-heads",
    "qwen3",
    "qwen3-moe",
    "mixtral-window-tied",
    "gemma",
    "gemma2",
    "gemma3-ropes",
    "llama4",
    "gpt-oss",
]
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.mark.parametrize("variant", [*LLAMAS, *OTHERS])
def test_greedy_text_equals_that_of_transformers_over_64_tokens(oracle, variant):
    assert variant in VARIANTS
    folder = oracle.make(variant)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 316, length).tolist() for length in (1, 20, 32)]
    expected = [oracle.generate(folder, prompt, 64) for prompt in prompts]
    engine = make_engine(folder, dtype="float32", enable_chunked_prefill=True)
    assert [tokens(outputs) for outputs in run(engine, *[(prompt, GREEDY) for prompt in prompts])] == expected


FAMILIES = ["multi-head", "phi3-window", "smollm3", *OTHERS]
# All of them on 8, and by turns on 2 or 4, which differ in sizes only; the rest is slow.
ON_DEVICES = [
    pytest.param(variant, number, marks=[pytest.mark.slow] if number == (4, 2)[i % 2] else [])
    for i, variant in enumerate(FAMILIES)
    for number in (2, 4, 8)
]


@pytest.mark.parametrize(("variant", "number"), ON_DEVICES)
def test_greedy_text_of_several_devices_equals_that_of_transformers(oracle, many_devices, variant, number):
    """Also where there are more devices than heads of keys and values, or the devices do not divide the heads."""
    folder = oracle.make(variant)
    prompts = [np.random.default_rng(0).integers(3, 316, length).tolist() for length in (1, 20, 32)]
    expected = [oracle.generate(folder, prompt, 24) for prompt in prompts]
    assert many_devices.greedy(folder, number, prompts, 24) == expected


def test_a_sequence_that_grows_beyond_the_switch_is_continued_as_one_that_was_long_all_the_time(oracle):
    """Compared with forward passes over all tokens, which transformers' own generate differs from here."""
    folder = oracle.make("phi3-beyond-the-switch")
    prompt = np.random.default_rng(0).integers(3, 316, 20).tolist()
    expected = list(prompt)
    for _ in range(30):
        expected.append(int(oracle.logits(folder, expected)[-1].argmax()))
    engine = make_engine(folder, dtype="float32", enable_chunked_prefill=True)
    (outputs,) = run(engine, (prompt, SamplingParams(temperature=0, max_tokens=30)))
    assert tokens(outputs) == expected[20:]
