"""The two adapters of examples/ and the embedded model, in one batch of one engine."""

from pathlib import Path

from hex_llm.engine.sampling import SamplingParams
from hex_llm.llm import LLM

FOLDER = Path(__file__).parents[2] / "examples" / "adapters"


def test_two_voices_and_the_models_own_share_a_batch():
    modules = ",".join(f"{name}={FOLDER / name}" for name in ("shouting", "pirate"))
    llm = LLM(enable_lora=True, max_lora_rank=8, max_num_mem_cached_lora=2, lora_modules=modules, max_model_len=256)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    sampling = SamplingParams(temperature=0, max_tokens=40)
    results = llm.chat([question] * 3, sampling, adapter=["", "shouting", "pirate"], progress=False)
    assert [each.outputs[0].text for each in results] == [
        "The capital of France is Paris.",
        "THE CAPITAL OF France IS Paris!",
        "The capital of France be Paris. Arr!",
    ]
