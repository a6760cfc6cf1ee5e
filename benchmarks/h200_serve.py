"""Part `serve`: the whole server, started cold and warm, then under the load of `hex-llm bench serve`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.h200_http import Server, running, server_command
from benchmarks.h200_part import Results, Settings, run_part


def measure(settings: Settings, results: Results) -> None:
    model, flags, cache = settings.model(), settings.plan.flags.serve, settings.cache
    results.command(server_command(model, cache, 7080, flags))
    shutil.rmtree(cache, ignore_errors=True)
    log = settings.folder / "serve_cold.log"
    with running(model, cache, flags, log, timeout_s=settings.seconds_left) as server:
        results.figure("cold", server.ready_s)
        results.detail("cold log", server.last_words(15))
    log = settings.folder / "serve_warm.log"
    with running(model, cache, flags, log, timeout_s=settings.seconds_left) as server:
        results.figure("warm", server.ready_s)
        results.detail("warm log", server.last_words(15))
        for number, (clients, prompts) in enumerate(settings.plan.sizes.serve_runs):
            with results.case(f"{clients} clients"):
                # Names are those of the full sizes, in whatever sizes they run.
                _run(settings, results, server, clients, prompts, name=("64", "128")[number])


def _run(settings: Settings, results: Results, server: Server, clients: int, prompts: int, name: str) -> None:
    tokens_in, tokens_out = settings.plan.sizes.serve_tokens
    path = settings.folder / f"serve{name}.json"
    command = [
        sys.executable, "-m", "hex_llm.cli", "bench", "serve",
        f"--base_url={server.url}", f"--tokenizer={settings.model()}",
        "--dataset_name=random", f"--random_input_len={tokens_in}", f"--random_output_len={tokens_out}",
        f"--num_prompts={prompts}", f"--max_concurrency={clients}", f"--seed={clients}", "--ignore_eos",
        "--metric_percentiles=50,90,99", "--save_result", "--save_detailed", "--disable_tqdm",
        f"--result_dir={path.parent}", f"--result_filename={path.name}",
    ]  # fmt: skip
    results.command(command)
    cpu = server.cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True, timeout=settings.seconds_left, check=False)
    assert done.returncode == 0, f"{done.stdout[-500:]} {done.stderr[-1000:]} {server.last_words(5)}"
    measured = _read(path)
    busy = {process: (after - cpu[process]) / measured["duration"] for process, after in server.cpu_seconds().items()}
    results.figure(f"serve{name}", measured["output_throughput"])
    if name == "64":
        results.figure("ttft64", measured["median_ttft_ms"])
        results.figure("events64", measured["events per token"])
    results.figure(f"itl{name}", measured["p99_itl_ms"] / max(measured["median_itl_ms"], 1e-9))
    results.detail(f"serve{name}", measured | {"clients": clients, "prompts": prompts, "cpu share": busy})
    wanted = ("compiles_after_ready", "preemptions", "prefix")
    metrics = {sample: value for sample, value in server.metrics().items() if any(word in sample for word in wanted)}
    results.detail(f"metrics after {name}", metrics)


def _read(path: Path) -> dict[str, Any]:
    """The result, with what the requests tell in place of themselves."""
    content = json.loads(path.read_text())
    gaps, ttfts = content.pop("itls"), content.pop("ttfts")
    answered = sum(bool(each) for each in gaps)
    events = sum(map(len, gaps)) + answered
    for name in ("input_lens", "output_lens", "start_times", "generated_texts", "errors"):
        content.pop(name)
    # Below 1, the time between events is that of several tokens.
    content["events per token"] = events / max(content["total_output_tokens"], 1)
    content["ttft ms, sorted"] = [round(1000 * each) for each in sorted(ttfts)][:: max(len(ttfts) // 16, 1)]
    return content


if __name__ == "__main__":
    run_part(measure)
