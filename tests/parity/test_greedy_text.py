"""What the whole engine generates, against transformers' generate."""

import numpy as np
import pytest

from hex_llm.engine.request import SamplingParams
from tests.parity.oracle import VARIANTS
from tests.runner.engines import make_engine, run, tokens

ROPES = ["multi-head", "theta-1e6", "rope-linear", "rope-llama3-8", "rope-llama3-32-tied", "wide-heads", "biased"]
OTHERS = ["mistral-window", "qwen2", "qwen2-tied-odd-heads"]
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.mark.parametrize("variant", [*ROPES, *OTHERS])
def test_greedy_text_equals_that_of_transformers_over_64_tokens(oracle, variant):
    assert variant in VARIANTS
    folder = oracle.make(variant)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 320, length).tolist() for length in (1, 20, 32)]
    expected = [oracle.generate(folder, prompt, 64) for prompt in prompts]
    engine = make_engine(folder, dtype="float32", enable_chunked_prefill=True)
    assert [tokens(outputs) for outputs in run(engine, *[(prompt, GREEDY) for prompt in prompts])] == expected
