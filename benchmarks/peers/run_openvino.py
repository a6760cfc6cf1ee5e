"""OpenVINO GenAI on the CPU, from a model exported by optimum-intel."""

# pyright: reportMissingImports=false
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from protocol import Generate, Job, Timeline, lockstep, measure

CACHE_GB = 2


def load(job: Job) -> Generate:
    """Variants are a precision, or a precision and `stateful`: one contiguous cache instead of paged attention."""
    precision, _, backend = job.variant.partition("-")
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": job.threads}
    folder = export(job)
    return stateful(folder, settings) if backend == "stateful" else paged(folder, settings)


def export(job: Job) -> Path:
    folder = job.work / "exported"
    if not (folder / "openvino_detokenizer.xml").exists():
        tool = Path(sys.executable).with_name("optimum-cli")
        command = [tool, "export", "openvino", "--task", "text-generation-with-past", "--weight-format", "fp16"]
        subprocess.run([*command, "--model", job.model, folder], check=True, stdout=sys.stderr)
    return folder


def paged(folder: Path, settings: dict[str, object]) -> Generate:
    schedule = openvino_genai.SchedulerConfig()
    schedule.cache_size = CACHE_GB
    schedule.max_num_batched_tokens = 4096  # all prompts of the batch in the first step
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), schedule, "CPU", settings)

    def generate(prompts: list[list[int]], output_len: int) -> Timeline:
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        marks = [time.perf_counter()]
        handles = [pipeline.add_request(row, ids, greedy(output_len)) for row, ids in enumerate(inputs)]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            marks.append(time.perf_counter())
        if len(marks) != output_len + 1:
            raise SystemExit(f"{output_len} tokens took {len(marks) - 1} steps, so the first step was not all prefill")
        return lockstep(marks, [list(handle.read_all()[0].generated_ids) for handle in handles])

    return generate


def stateful(folder: Path, settings: dict[str, object]) -> Generate:
    pipeline = openvino_genai.LLMPipeline(str(folder), "CPU", ATTENTION_BACKEND="SDPA", **settings)

    def generate(prompts: list[list[int]], output_len: int) -> Timeline:
        ids = np.array(prompts, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        start = time.perf_counter()
        results = pipeline.generate(inputs, greedy(output_len))
        last_s = time.perf_counter() - start
        first_s = results.perf_metrics.get_ttft().mean / 1000
        return Timeline(first_s, last_s, len(prompts) * (output_len - 1), [list(row) for row in results.tokens])

    return generate


def greedy(output_len: int) -> openvino_genai.GenerationConfig:
    return openvino_genai.GenerationConfig(
        max_new_tokens=output_len,
        min_new_tokens=output_len,
        ignore_eos=True,
        do_sample=False,
        apply_chat_template=False,
    )


measure(load)
