"""Part `offline`: the engine without a server, all requests there from the start, in the shapes that others publish."""

import dataclasses
import sys

from benchmarks.h200_part import Results, Settings, run_part
from benchmarks.h200_settings import TENSORRT_LLM_FP8
from benchmarks.h200_step import make_engine
from hex_llm import log
from hex_llm.bench import offline
from hex_llm.engine.engine import Engine

RESERVE_S = 5.0


def measure(settings: Settings, results: Results) -> None:
    log.configure()
    results.command([sys.executable, "-m", "benchmarks.h200", "--only=offline"])
    engine, seconds = make_engine(settings, settings.plan.flags.offline)
    limits = dataclasses.asdict(engine.limits)
    results.detail("engine", {"built s": round(seconds, 1), **limits})
    runs = settings.plan.sizes.offline_runs
    speed = 0.0  # of the run before, in the unit of `_work` per second
    for number, (tokens_in, tokens_out, requests) in enumerate(runs):
        with results.case(f"{tokens_in}/{tokens_out}"):
            left = sum(_work(*run) for run in runs[number:])
            if speed and left > (room := speed * (settings.seconds_left - RESERVE_S)):
                requests = max(int(requests * room / left), 1)
            steps, preemptions = _counts(engine)
            found = offline.measure(engine, requests, tokens_in, tokens_out, seed=number)
            speed = _work(tokens_in, tokens_out, requests) / found.total_s
            after = _counts(engine)
            figures = dataclasses.asdict(found) | {"steps": after[0] - steps, "preemptions": after[1] - preemptions}
            published = TENSORRT_LLM_FP8.get((tokens_in, tokens_out))
            if published:
                figures["of TensorRT-LLM FP8"] = found.output_tokens_per_s / published
            results.detail(f"{tokens_in}/{tokens_out}", figures)
            results.figure(f"offline_{tokens_in}_{tokens_out}", found.output_tokens_per_s)


def _work(tokens_in: int, tokens_out: int, requests: int) -> float:
    """What a run costs, in tokens out; of tokens in, some ten cost as much."""
    return requests * (tokens_out + tokens_in / 10)


def _counts(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return stats.total_steps, stats.total_preemptions


if __name__ == "__main__":
    run_part(measure)
