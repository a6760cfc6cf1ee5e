"""Part `peer`: transformers' continuous batching on the same shape with random weights, in the same run.

Needs torch and transformers, and neither JAX nor hex_llm.
"""

# pyright: reportMissingImports=false
import time
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.h200_part import Results, Settings, run_part


def measure(settings: Settings, results: Results) -> None:
    sizes = settings.plan.sizes
    shape: dict[str, Any] = {**settings.plan.shape, "attn_implementation": "sdpa"}
    results.command([settings.peer_python, "-m", "benchmarks.h200", "--only=peer"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert device == "cuda" or settings.plan_name == "tiny", f"torch {torch.__version__} finds no GPU to compare with"
    for name in ("architectures", "model_type", "torch_dtype"):
        shape.pop(name)
    started = time.monotonic()
    config = LlamaConfig(**shape)
    model = _random_model(config, device)
    results.detail("model made s", round(time.monotonic() - started, 1))
    length, output = sizes.peer_tokens
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, shape["vocab_size"], (sizes.peer_requests, length), generator=generator).tolist()
    options = GenerationConfig(do_sample=False, max_new_tokens=output, eos_token_id=-1, pad_token_id=0)
    started = time.monotonic()
    answers = model.generate_batch(inputs=prompts, generation_config=options, record_timestamps=True)
    results.detail("generate_batch s", round(time.monotonic() - started, 1))
    times = [answer.timestamps or [] for answer in answers.values()]
    tokens = [len(answer.generated_tokens) for answer in answers.values()]
    assert tokens == [output] * sizes.peer_requests, f"the answers have {tokens} tokens"
    rate, seconds = decode_rate(times)
    results.detail("decode s", round(seconds, 2))
    results.detail("versions", {"torch": torch.__version__, "device": device})
    results.figure("peer_decode", rate)


def _random_model(config: LlamaConfig, device: str) -> LlamaForCausalLM:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(dtype)


def decode_rate(times: list[list[float]]) -> tuple[float, float]:
    """Tokens per second while all requests decode: from the last first token to the first last one; and the seconds."""
    start, end = max(each[0] for each in times), min(each[-1] for each in times)
    assert start < end, "no moment had all requests decoding"
    return sum(start < moment <= end for each in times for moment in each) / (end - start), end - start


if __name__ == "__main__":
    run_part(measure)
