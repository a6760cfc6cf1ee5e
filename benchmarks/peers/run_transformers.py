"""transformers' `generate` on the CPU, as its user would call it."""

# pyright: reportMissingImports=false
import time

import torch
from protocol import Generate, Job, Timeline, lockstep, measure
from transformers import AutoModelForCausalLM, StoppingCriteria

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Clock(StoppingCriteria):
    """Never stops anything: `generate` asks it after every token, so it knows when each one came."""

    def __init__(self):
        self.marks = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.marks.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load(job: Job) -> Generate:
    """Variants are a dtype, or a dtype and the cache to use: `f32`, `bf16-static`."""
    torch.set_num_threads(job.threads)
    dtype, _, cache = job.variant.partition("-")
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=DTYPES[dtype]).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], output_len: int) -> Timeline:
        inputs = torch.tensor(prompts)
        clock = Clock()
        tokens = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=output_len,
            do_sample=False,
            cache_implementation=cache or None,
            stopping_criteria=[clock],
        )
        return lockstep(clock.marks, tokens[:, inputs.shape[1] :].tolist())

    return generate


measure(load)
