"""vLLM's CPU build, in one process.

It does not tell when the first tokens came, so a batch is timed twice: with one token per request, and with all.
"""

# pyright: reportMissingImports=false
import os
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

from protocol import Generate, Job, Timeline, measure
from vllm import LLM, SamplingParams, TokensPrompt

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def load(job: Job) -> Generate:
    model = LLM(
        model=str(job.model),
        dtype=DTYPES[job.variant],
        max_model_len=1024,
        max_num_seqs=64,
        enable_prefix_caching=False,
    )

    def timed(prompts: list[list[int]], output_len: int) -> tuple[float, list[list[int]]]:
        sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        start = time.perf_counter()
        results = model.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, [list(result.outputs[0].token_ids) for result in results]

    def generate(prompts: list[list[int]], output_len: int) -> Timeline:
        first_s, _ = timed(prompts, 1)
        last_s, outputs = timed(prompts, output_len)
        return Timeline(first_s, last_s, len(prompts) * (output_len - 1), outputs)

    return generate


if __name__ == "__main__":
    measure(load)
