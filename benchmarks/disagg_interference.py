"""What long prompts do to answers that are under way: the plain server, and one with an engine for prompts of its own.

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 python -m benchmarks.disagg_interference --plain=--data_parallel_size=2
    python -m benchmarks.disagg_interference --one_card -- --model=FOLDER --load_format=dummy    # one GPU

Some streams decode all the while; then long prompts, no two alike, arrive at a steady rate, each with a short answer.
What counts is the time between two tokens of the streams while prompts are being worked on. Every server has the same
devices in all: the plain ones have two engines too (--data_parallel_size=2). With --one_card the two engines of the
split server share a GPU, by halves of its memory and, as its driver does it, by slices of its time; the plain ones have
one engine, which has it all.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.h200_http import Server
from hex_llm.bench.local_server import free_port


@dataclass(frozen=True)
class Load:
    streams: int  # at a time
    answers: int  # of all streams, one after the other
    answer_tokens: int
    prompts: int
    prompt_tokens: int
    rate: float  # of prompts, each second


@dataclass(frozen=True)
class Measured:
    """Milliseconds; of the tokens of streams that came while long prompts were under way."""

    gaps: np.ndarray
    first_token: np.ndarray  # of the long prompts
    transfers: dict[str, float]

    @property
    def p99(self) -> float:
        return float(np.percentile(self.gaps, 99))

    def row(self) -> str:
        p50, p90, p99, worst = np.percentile(self.gaps, [50, 90, 99, 100])
        first50, first99 = np.percentile(self.first_token, [50, 99])
        return f"{p50:9.1f} {p90:9.1f} {p99:9.1f} {worst:9.1f} {first50:11.0f} {first99:11.0f}"


def main() -> None:
    arguments = _parser().parse_args()
    load = Load(
        arguments.streams,
        arguments.answers,
        arguments.answer_tokens,
        arguments.prompts,
        arguments.prompt_tokens,
        arguments.rate,
    )
    servers = {
        "plain": [*arguments.plain],
        "plain, chunked prefill": [*arguments.plain, "--enable_chunked_prefill"],
        "disagg_topo=1,1": [*arguments.split],
    }
    print(f"{load}\n{'':24} {'p50 ITL':>9} {'p90':>9} {'p99':>9} {'most':>9} {'p50 TTFT':>11} {'p99 TTFT':>11}   ms")
    measured = {}
    for name, flags in servers.items():
        if arguments.one_card:
            split = name == "disagg_topo=1,1"
            os.environ |= {"CUDA_VISIBLE_DEVICES": "0,0" if split else "0"}
            os.environ |= {"XLA_CLIENT_MEM_FRACTION": "0.45" if split else "0.9"}
        measured[name] = _measure(name, [*arguments.flags, *flags], load, Path(arguments.logs))
        print(f"{name:24} {measured[name].row()}", flush=True)
    ratio = measured["disagg_topo=1,1"].p99 / measured["plain"].p99
    print(f"p99 ITL of disagg_topo=1,1 over that of the plain server: {ratio:.3f}")
    for name, value in measured["disagg_topo=1,1"].transfers.items():
        print(f"  {name} {value:g}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--answer_tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt_tokens", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--plain", action="append", default=[], help="a flag of the plain servers")
    parser.add_argument("--split", action="append", default=["--disagg_topo=1,1"], help="a flag of the other")
    parser.add_argument("--one_card", action="store_true", help="two engines on one GPU")
    parser.add_argument("--logs", default=tempfile.gettempdir(), help="a folder for what servers say")
    parser.add_argument("flags", nargs="*", help="flags of all servers, after --")
    return parser


def _measure(name: str, flags: list[str], load: Load, logs: Path) -> Measured:
    port = free_port()
    command = [
        sys.executable, "-m", "hex_llm.server.api_server", "--host=127.0.0.1", f"--port={port}",
        "--disable_log_requests", *flags,
    ]  # fmt: skip
    server = Server(command, port, logs / f"{name.replace(' ', '_').replace(',', '')}.log", timeout_s=600)
    try:
        with tempfile.TemporaryDirectory() as folder:
            at_once = [f"--max_concurrency={load.streams}"]
            streams = _bench(
                server, Path(folder) / "streams.json", load.answers, 32, load.answer_tokens, at_once, seed=1
            )
            time.sleep(4)  # they decode by now
            began = time.time()
            steadily = [f"--request_rate={load.rate}", "--burstiness=1000"]
            prompts = _bench(
                server, Path(folder) / "prompts.json", load.prompts, load.prompt_tokens, 8, steadily, seed=2
            )
            _wait(prompts, server)
            ended = time.time()
            assert streams.poll() is None, "the streams ended before the prompts: more --answers are needed"
            _wait(streams, server)
            found = [json.loads((Path(folder) / f"{each}.json").read_text()) for each in ("streams", "prompts")]
        wanted = ("kv_transfer", "compiles_after_ready", "preemptions")
        transfers = {name: value for name, value in server.metrics().items() if any(w in name for w in wanted)}
    finally:
        server.stop()
    return Measured(_gaps(found[0], began, ended), 1000 * np.array(found[1]["ttfts"]), transfers)


def _gaps(result: dict, began: float, ended: float) -> np.ndarray:
    """Those of the streams within the time of the prompts."""
    start = time.time() - time.perf_counter()  # of the clock that start times are on
    gaps = []
    for first, ttft, itls in zip(result["start_times"], result["ttfts"], result["itls"], strict=True):
        times = start + first + ttft + np.cumsum(itls)
        gaps += [gap for at, gap in zip(times, itls, strict=True) if began <= at <= ended]
    return 1000 * np.array(gaps)


def _bench(
    server: Server, path: Path, count: int, tokens_in: int, tokens_out: int, how: list[str], *, seed: int
) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "hex_llm.cli", "bench", "serve", f"--base_url={server.url}", "--dataset_name=random",
        f"--random_input_len={tokens_in}", f"--random_output_len={tokens_out}", f"--num_prompts={count}",
        f"--seed={seed}", "--ignore_eos", "--save_result", "--save_detailed", "--disable_tqdm",
        f"--result_dir={path.parent}", f"--result_filename={path.name}",
        *how,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)


def _wait(client: subprocess.Popen[str], server: Server) -> None:
    said, _ = client.communicate(timeout=900)
    assert client.returncode == 0, f"{said[-1500:]}\n{server.last_words(10)}"


if __name__ == "__main__":
    main()
