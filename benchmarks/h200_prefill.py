"""Part `prefill`: the time to the first token of long prompts on an idle server, new to it and known to it."""

import statistics

import numpy as np

from benchmarks.h200_http import Server, running, server_command
from benchmarks.h200_part import Results, Settings, run_part
from benchmarks.h200_settings import MATMUL_TFLOPS, prefill_flops


def measure(settings: Settings, results: Results) -> None:
    model, flags = settings.model(), settings.plan.flags.prefill
    results.command(server_command(model, settings.cache, 7080, flags))
    log = settings.folder / "prefill.log"
    with running(model, settings.cache, flags, log, timeout_s=settings.seconds_left) as server:
        results.detail("ready s", server.ready_s)
        with results.case("prefill"):
            _prefill(settings, results, server)
        with results.case("prefix"):
            _prefix(settings, results, server)
        results.detail("log", server.last_words(10))


def _prefill(settings: Settings, results: Results, server: Server) -> None:
    sizes, shape = settings.plan.sizes, settings.plan.shape
    prompts = _prompts(settings, sizes.prefill_repeats + 2, sizes.prefill_tokens, seed=1)
    seconds = [server.first_token_s(prompt) for prompt in prompts][2:]  # the first compile, or fill caches
    results.detail("prefill ms", [round(1000 * each, 2) for each in seconds])
    flops = prefill_flops(shape, sizes.prefill_tokens)
    results.detail("prefill TFLOP", flops / 1e12)
    results.figure("prefill8k", flops / statistics.median(seconds) / (MATMUL_TFLOPS * 1e12))


def _prefix(settings: Settings, results: Results, server: Server) -> None:
    sizes = settings.plan.sizes
    prompts = _prompts(settings, sizes.prefix_repeats + 1, sizes.prefix_tokens, seed=2)
    pairs = [(server.first_token_s(prompt), server.first_token_s(prompt)) for prompt in prompts][1:]
    uncached, cached = (statistics.median(each) for each in zip(*pairs, strict=True))
    results.detail("prefix ms, uncached and cached", [[round(1000 * each, 2) for each in pair] for pair in pairs])
    results.figure("prefix32k", cached / uncached)


def _prompts(settings: Settings, count: int, length: int, *, seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return random.integers(0, settings.plan.shape["vocab_size"], (count, length)).tolist()


if __name__ == "__main__":
    run_part(measure)
