"""onnxruntime-genai on the CPU, from a model its own builder exports; its CPU kernels are f32 only."""

# pyright: reportMissingImports=false
import json
import subprocess
import sys
import time

import onnxruntime_genai
from protocol import Generate, Job, Timeline, lockstep, measure

PRECISIONS = {"f32": "fp32"}


def load(job: Job) -> Generate:
    folder = job.work / job.variant
    if not (folder / "genai_config.json").exists():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p"]
        command += [PRECISIONS[job.variant], "-m", job.model, "-i", job.model, "-o", folder, "-c", job.work / "hub"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        config = json.loads((folder / "genai_config.json").read_text())
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = job.threads
        (folder / "genai_config.json").write_text(json.dumps(config))
    model = onnxruntime_genai.Model(str(folder))

    def generate(prompts: list[list[int]], output_len: int) -> Timeline:
        length = len(prompts[0]) + output_len
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(batch_size=len(prompts), min_length=length, max_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(model, parameters)
        marks = [time.perf_counter()]
        generator.append_tokens(prompts)
        for _ in range(output_len):
            generator.generate_next_token()
            marks.append(time.perf_counter())
        outputs = [generator.get_sequence(row)[len(prompts[0]) :].tolist() for row in range(len(prompts))]
        return lockstep(marks, outputs)

    return generate


measure(load)
