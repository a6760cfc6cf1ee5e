"""Weights and keys and values in few bits on one H200: decode steps of an 8B, and a 70B as it is served.

    python -m benchmarks.h200_few_bits --json few_bits.json [--only steps,serve] [--ways bf16,int4] [--budget-s 600]

Every engine and server has a process of its own, with random weights of the real sizes. `benchmarks/h200_quant.py` and
`h200_fp8.py` measure the products alone, and `h200_pages.py` attention.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.h200_http import Server, running
from benchmarks.h200_model import write_model
from benchmarks.h200_settings import LLAMA_8B, PLANS, Sizes

if TYPE_CHECKING:
    from benchmarks.h200_trace import Profile  # imports jax, which this process leaves to those that it starts

LLAMA_70B: Mapping[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
STEP_FLAGS = ("--max_model_len=4096", "--max_decode_seqs=128", "--enable_chunked_prefill", "--no-warmup")
SERVE_FLAGS = ("--max_model_len=4096", "--max_decode_seqs=128", "--decode_seqs_padding=64", "--enable_chunked_prefill",
               "--disable_log_requests")  # fmt: skip
TINY_FLAGS = ("--max_model_len=256", "--max_decode_seqs=16", "--enable_chunked_prefill", "--num_blocks=256",
              "--prefill_len_padding=128", "--max_num_batched_tokens=256")  # fmt: skip
SMALL: Mapping[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
}
KERNELS_KEPT = 24
RESULTS = ("output_throughput", "completed", "duration", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
COUNTS = ("compiles_after_ready", "preemptions")


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """How a model is kept."""

    flags: tuple[str, ...] = ()
    quantization_config: Mapping[str, Any] | None = None  # of a checkpoint

    def model(self, folder: Path, shape: Mapping[str, Any]) -> Path:
        more = {} if self.quantization_config is None else {"quantization_config": dict(self.quantization_config)}
        return write_model(folder, {**shape, **more})


WAYS = {
    "bf16": Way(),
    "int4": Way(quantization_config=AWQ),
    "int8": Way(("--quantization=int8",)),
    "fp8": Way(("--quantization=fp8",)),
    "w8a8": Way(("--quantization=w8a8",)),
    "w4a8": Way(("--quantization=w4a8",), AWQ),
    "int4-kv8": Way(("--kv_cache_dtype=fp8",), AWQ),
    "int8-kv8": Way(("--quantization=int8", "--kv_cache_dtype=fp8")),
    "fp8-kv8": Way(("--quantization=fp8", "--kv_cache_dtype=fp8")),
    "w8a8-kv8": Way(("--quantization=w8a8", "--kv_cache_dtype=fp8")),
    "w4a8-kv8": Way(("--quantization=w4a8", "--kv_cache_dtype=fp8"), AWQ),
    "bf16-kvint8": Way(("--kv_cache_dtype=int8",)),
    "fp8-kvint8": Way(("--quantization=fp8", "--kv_cache_dtype=int8")),
}
STEP_WAYS = ("bf16", "int4", "int8", "fp8-kv8", "fp8-kvint8")
SERVE_WAYS = ("int4-kv8", "int8-kv8", "fp8-kv8")


def measure_steps(model: Path, flags: list[str], cache: Path, sizes: Sizes) -> dict[str, Any]:
    """In this process, which has the device to itself."""
    import gc

    from benchmarks.h200_step import Clock, finish, start_decodes, step_ms, time_steps
    from benchmarks.h200_trace import read_profile, tracing
    from hex_llm import log
    from hex_llm.build import build_engine, find_model
    from hex_llm.config import Config

    log.configure()
    words = [f"--model={model}", "--load_format=dummy", f"--compilation_cache_dir={cache}", *flags]
    config = Config.from_args(words)
    started = time.monotonic()
    engine = build_engine(config, find_model(config))
    found: dict[str, Any] = {"built_s": round(time.monotonic() - started, 1), "kv_tokens": engine.limits.kv_tokens}
    gc.freeze()  # as the server's engine does
    clock = Clock(engine._runner)
    engine._runner = clock
    for batch in sizes.step_batches:
        traced = sizes.traced_steps if batch == sizes.traced_batch else 0
        requests = start_decodes(engine, batch, sizes, sizes.steps + traced, {"temperature": 0.0})
        timing = time_steps(engine, clock, sizes.steps)
        found[f"b{batch}"] = {name: round(ms, 3) for name, ms in timing.items()}
        if traced:
            with tempfile.TemporaryDirectory() as name:
                with tracing(folder := Path(name)):
                    step_ms(engine, traced)
                found[f"b{batch} kernels"] = _kernels(read_profile(folder), timing["step_ms"])
        finish(engine, requests)
    return found


def _kernels(profile: "Profile", step_ms: float) -> dict[str, list[float]]:
    """Of a step, by name: how many, their microseconds in all, and what they add to those of the others: they overlap
    where one begins ahead of another."""
    steps, added = profile.span_ns / 1e6 / step_ms, profile.added()
    longest = list(profile.by("name").items())[:KERNELS_KEPT]
    return {
        name: [round(figure / steps, 1) for figure in (count, total, added[name])] for name, (count, total) in longest
    }


def measure_serving(
    model: Path,
    flags: list[str],
    cache: Path,
    runs: tuple[tuple[int, int], ...],
    tokens: tuple[int, int],
    left_s: float,
) -> dict[str, Any]:
    deadline, found = time.monotonic() + left_s, {}
    with (
        tempfile.TemporaryDirectory() as name,
        running(model, cache, flags, (folder := Path(name)) / "server.log", timeout_s=left_s) as server,
    ):
        found["ready_s"] = round(server.ready_s, 1)
        said = server.log.read_text(errors="replace")
        built = re.findall(r"Engine built in .*|Loading .*|.* weights in .*|Allocated .*", said)
        found["log"] = [line[-200:] for line in built]
        found["memory"] = _memory()
        for clients, prompts in runs:
            found[f"{clients} clients"] = bench_serve(server, model, (clients, prompts), tokens, folder, deadline)
    return found


def _memory() -> str:
    """What the driver says is in use; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def bench_serve(
    server: Server,
    model: Path,
    load: tuple[int, int],
    tokens: tuple[int, int],
    folder: Path,
    deadline: float,
    more: Sequence[str] = (),
) -> Any:
    """What `hex-llm bench serve` finds of so many clients and prompts, of so many tokens in and out."""
    (clients, prompts), path = load, folder / "bench.json"
    command = [
        sys.executable, "-m", "hex_llm.cli", "bench", "serve", f"--base_url={server.url}", f"--tokenizer={model}",
        "--dataset_name=random", f"--random_input_len={tokens[0]}", f"--random_output_len={tokens[1]}",
        f"--num_prompts={prompts}", f"--max_concurrency={clients}", f"--seed={clients}", "--ignore_eos",
        "--metric_percentiles=50,90,99", "--save_result", "--disable_tqdm",
        f"--result_dir={folder}", f"--result_filename={path.name}", *more,
    ]  # fmt: skip
    left = max(deadline - time.monotonic(), 1)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after the {left:.0f} s that were left"}
    if done.returncode:
        return {"failed": f"{done.stdout[-400:]} {done.stderr[-800:]} {server.last_words(5)}"}
    content = json.loads(path.read_text())
    counts = {name: value for name, value in server.metrics().items() if any(word in name for word in COUNTS)}
    return {name: content.get(name) for name in RESULTS} | {"prompts": prompts} | counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="steps,serve")
    parser.add_argument("--ways", help="of both parts; by default those that each has a figure to show for")
    parser.add_argument("--shape", choices=("full", "tiny"), default="full", help="tiny: to see on a CPU that it works")
    parser.add_argument("--serve-shape", choices=("70b", "8b"), default="70b")
    parser.add_argument("--serve-runs", default="64:128,128:256", help="clients:prompts, ...")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "h200_few_bits")
    parser.add_argument("--budget-s", type=float, default=1500)
    parser.add_argument("--batches", help="of steps, such as 64: each takes some 20 s; by default 64, 128 and 1")
    parser.add_argument("--steps-of", help=argparse.SUPPRESS)  # one way's steps, in this process
    options = parser.parse_args()
    tiny = options.shape == "tiny"
    if options.steps_of:
        flags, folder = _step_case(options.steps_of, tiny, options.folder)
        sizes = PLANS["tiny"].sizes if tiny else Sizes()
        if options.batches:
            sizes = dataclasses.replace(sizes, step_batches=tuple(map(int, options.batches.split(","))))
        found = measure_steps(folder, flags, options.folder / "cache", sizes)
        options.json.write_text(json.dumps(found))
        return
    deadline, results = time.monotonic() + options.budget_s, {}

    def record(name: str, measure: Callable[[], Any]) -> None:
        started = time.monotonic()
        if started > deadline:
            results[name] = "no time left"
        else:
            try:
                results[name] = measure()
            except Exception as error:
                results[name] = f"failed: {str(error)[-1500:]}"
        print(f"{name} ({time.monotonic() - started:.0f} s): {json.dumps(results[name])}", flush=True)
        options.json.write_text(json.dumps(results, indent=1))

    parts = options.only.split(",")
    if "steps" in parts:
        for way in (options.ways or ",".join(STEP_WAYS)).split(","):
            record(f"steps {way}", lambda way=way: _steps_apart(way, options, deadline))
    if "serve" in parts:
        runs = tuple((int(a), int(b)) for a, b in (run.split(":") for run in options.serve_runs.split(",")))
        shape = SMALL if tiny else LLAMA_70B if options.serve_shape == "70b" else LLAMA_8B
        tokens, cache = (40, 20) if tiny else (1000, 1000), options.folder / "cache"
        for way in (options.ways or ",".join(SERVE_WAYS)).split(","):
            model = WAYS[way].model(options.folder / f"serve-{options.serve_shape}-{way}", shape)
            flags = [*(TINY_FLAGS if tiny else SERVE_FLAGS), *WAYS[way].flags]

            def serve(model: Path = model, flags: list[str] = flags) -> Any:
                return measure_serving(model, flags, cache, runs, tokens, deadline - time.monotonic())

            record(f"serve {options.serve_shape} {way}", serve)


def _step_case(way: str, tiny: bool, folder: Path) -> tuple[list[str], Path]:
    kept = WAYS[way]
    model = kept.model(folder / f"steps-{'tiny' if tiny else '8b'}-{way}", SMALL if tiny else LLAMA_8B)
    return [*(TINY_FLAGS if tiny else STEP_FLAGS), *kept.flags], model


def _steps_apart(way: str, options: argparse.Namespace, deadline: float) -> Any:
    result = options.folder / f"steps-{way}.json"
    options.folder.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "benchmarks.h200_few_bits", f"--json={result}", f"--steps-of={way}",
        f"--shape={options.shape}", f"--folder={options.folder}",
        *([f"--batches={options.batches}"] if options.batches else []),
    ]  # fmt: skip
    left = max(deadline - time.monotonic(), 10)
    done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    assert done.returncode == 0, f"{done.stdout[-300:]} {done.stderr[-1500:]}"
    return json.loads(result.read_text())


if __name__ == "__main__":
    main()
