"""Decode speed on the CPU, hex-llm side by side with its peers: prints a table and writes JSON.

    python benchmarks/cpu_peers.py                               # hex-llm, transformers and OpenVINO GenAI
    python benchmarks/cpu_peers.py --engines all --repeats 5

The engines run one after the other, each in a process and an environment of its own, in rounds: a slow minute of the
machine falls on all of them. An engine that cannot be installed or run here gets a line that says why.
"""

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from peers.checkpoint import MAX_PROMPT_LEN, MAX_PROMPTS, ensure_checkpoint
from peers.engines import ENGINES, HEX_LLM, ROOT, SCRIPTS, TRANSFORMERS, CannotInstall, Engine, last_line, python_of
from peers.table import print_table

DEFAULT_ENGINES = ("hex-llm", "transformers", "openvino")
# A variant this much slower than the engine's best at every batch has lost after the first round.
CLOSE = 0.85
# The tokens by which two engines are seen to run the same model; later ones may differ by rounding alone.
START = 4
# Other work above this share of the cores makes the figures of a run doubtful: engines that spin lose a factor of ten.
BUSY = 0.1
# Some virtual machines announce AMX and do not run it, and oneDNN believes them.
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


@dataclass
class Contestant:
    """An engine in one variant, with what it measured so far: one list of figures per round."""

    engine: Engine
    variant: str
    python: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    rounds: list[list[dict]] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # the share of the cores that others used in each round
    ended: str | None = None  # why it takes part no longer

    def speed(self, batch: int) -> float:
        return max(f["decode_tokens_per_s"] for figures in self.rounds for f in figures if f["batch"] == batch)


def main() -> None:
    options = parse()
    cache = options.json.parent
    model = ensure_checkpoint(options.model)
    contestants = enter(options, cache)
    for number in range(options.repeats):
        for contestant in contestants:
            if contestant.ended is None:
                take_part(contestant, options, model, cache, number)
        if number == 0 and not options.keep_all:
            end_the_slow(contestants, options.batches)
    report = {
        "machine": {"cpu": cpu_name(), "threads": options.threads, "python": platform.python_version()},
        "workload": {"input_len": options.input_len, "output_len": options.output_len, "batches": options.batches},
        "engines": [summary(each, options.batches, reference(contestants)) for each in contestants],
    }
    options.json.write_text(json.dumps(report, indent=2) + "\n")
    print_table(report)
    if any(busy > BUSY for each in contestants for busy in each.busy):
        print("NOT A MEASUREMENT: other work ran on this machine, see the lines of the rounds.")
    print(f"written to {options.json}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES, "all"], default=list(DEFAULT_ENGINES))
    parser.add_argument("--variants", nargs="+", help="only these, for instance: bf16 f32-static")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one engine, once through its batches")
    parser.add_argument("--keep-all", action="store_true", help="repeat every variant, also those that lost")
    parser.add_argument("--hex-llm-flags", default="", help="further flags of `hex-llm bench offline`, as one string")
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "bench" / "llama-100m")
    parser.add_argument("--json", type=Path, default=ROOT / ".cache" / "bench" / "cpu_peers.json")
    options = parser.parse_args()
    if max(options.batches) > MAX_PROMPTS or options.input_len > MAX_PROMPT_LEN:
        parser.error(f"there are {MAX_PROMPTS} prompts of {MAX_PROMPT_LEN} tokens, and no more")
    if min(options.batches) < 1 or options.output_len < 2 or options.repeats < 1 or options.input_len < 1:
        parser.error("batches, repeats and input-len are at least 1, and output-len at least 2")
    options.json = options.json.resolve()
    options.model = options.model.resolve()
    return options


def enter(options: argparse.Namespace, cache: Path) -> list[Contestant]:
    """The chosen variants of the chosen engines, each with the python that runs it."""
    names = list(ENGINES) if "all" in options.engines else dict.fromkeys(options.engines)
    contestants = []
    for engine in (ENGINES[name] for name in names):
        chosen = engine.variants
        if options.variants:
            chosen = tuple(v for v in (*engine.variants, *engine.also) if v in options.variants)
        entered = [Contestant(engine, variant) for variant in chosen]
        try:
            python = python_of(engine, cache / "envs")
        except CannotInstall as error:
            print(f"{engine.name}: {error}", flush=True)
            contestants += [Contestant(engine, variant, ended=str(error)) for variant in chosen[:1]]
            continue
        for contestant in entered:
            contestant.python = python
            contestant.environment = dict(engine.environment)
            if engine is HEX_LLM:
                contestant.environment["HEX_LLM_FLAGS"] = options.hex_llm_flags
        contestants += entered
    return contestants


def take_part(contestant: Contestant, options: argparse.Namespace, model: Path, cache: Path, number: int) -> None:
    """One process, once through the batches; a failure is kept as a line."""
    name = f"{contestant.engine.name} {contestant.variant}"
    started = time.monotonic()
    before = core_seconds()
    try:
        figures = run_once(contestant, options, model, cache)
    except RuntimeError as error:
        contestant.ended = str(error)
        print(f"round {number + 1}: {name}: {error}", flush=True)
        return
    contestant.rounds.append(figures)
    busy = others_share(before, core_seconds())
    contestant.busy.append(busy)
    speeds = ", ".join(f"batch {f['batch']}: {f['decode_tokens_per_s']:.1f} tok/s" for f in figures)
    doubt = f"; others used {busy:.0%} of the cores" if busy > BUSY else ""
    print(f"round {number + 1}: {name}: {speeds} ({time.monotonic() - started:.0f} s){doubt}", flush=True)


def run_once(contestant: Contestant, options: argparse.Namespace, model: Path, cache: Path) -> list[dict]:
    engine = contestant.engine
    work = cache / engine.name
    work.mkdir(parents=True, exist_ok=True)
    log = work / f"{contestant.variant}.log"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "figures.json"
        command = [str(contestant.python), str(SCRIPTS / engine.script), "--variant", contestant.variant]
        command += ["--model", str(model), "--work", str(work), "--json", str(answer)]
        command += ["--threads", str(options.threads), "--batches", *map(str, options.batches)]
        command += ["--input-len", str(options.input_len), "--output-len", str(options.output_len)]
        status = run_logged(command, contestant.environment, options.threads, log, options.timeout)
        if status == -signal.SIGILL and contestant.environment.keys().isdisjoint(WITHOUT_AMX):
            contestant.environment |= WITHOUT_AMX
            status = run_logged(command, contestant.environment, options.threads, log, options.timeout)
        if status != 0:
            raise RuntimeError(f"failed with status {status}: {last_line(log.read_text(errors='replace'))}")
        return json.loads(answer.read_text())


def run_logged(command: list[str], environment: dict[str, str], threads: int, log: Path, timeout: int) -> int:
    """The exit status of the command; nothing that it started lives on after it."""
    common = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_NUM_THREADS": str(threads),
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **common, **environment},
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"took more than {timeout} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def end_the_slow(contestants: list[Contestant], batches: list[int]) -> None:
    """Ends the variants that are far behind another of the same engine at every batch: only the best is compared.

    transformers keeps all of its own: it is what the others are measured by, and one unlucky run must not weaken it.
    """
    for engine in {each.engine.name for each in contestants if each.engine is not TRANSFORMERS}:
        ran = [each for each in contestants if each.engine.name == engine and each.rounds and not each.ended]
        for contestant in ran:
            best = {batch: max(each.speed(batch) for each in ran) for batch in batches}
            if all(contestant.speed(batch) < CLOSE * best[batch] for batch in batches):
                contestant.ended = "slower than another variant at every batch; not repeated"


def reference(contestants: list[Contestant]) -> list[list[int]] | None:
    """What transformers answered in f32 at the largest batch: the check that all engines run the same model."""
    for each in contestants:
        if each.engine is TRANSFORMERS and each.variant.startswith("f32") and each.rounds:
            return each.rounds[0][-1]["outputs"]
    return None


def summary(contestant: Contestant, batches: list[int], truth: list[list[int]] | None) -> dict:
    """Medians over the rounds, and every speed measured."""
    by_batch = {}
    for batch in batches if contestant.rounds else []:
        rounds = [f for figures in contestant.rounds for f in figures if f["batch"] == batch]
        names = ("decode_tokens_per_s", "prefill_s", "decode_s", "total_s")
        by_batch[str(batch)] = {name: statistics.median(f[name] for f in rounds) for name in names}
        by_batch[str(batch)]["all_decode_tokens_per_s"] = [f["decode_tokens_per_s"] for f in rounds]
    outputs = contestant.rounds[0][-1]["outputs"] if contestant.rounds else None
    same_start = None
    if outputs and truth:
        same_start = statistics.mean(a[:START] == b[:START] for a, b in zip(outputs, truth, strict=True))
    return {
        "engine": contestant.engine.name,
        "variant": contestant.variant,
        "runs": len(contestant.rounds),
        "batches": by_batch,
        "same_start": same_start,
        "others_share": contestant.busy,
        "note": contestant.ended,
    }


@dataclass(frozen=True)
class CoreSeconds:
    """Since the machine started: of all cores, of those in use (or taken by the host), and of our own processes."""

    total: float
    used: float
    ours: float


def core_seconds() -> CoreSeconds | None:
    """None where the system does not tell."""
    if sys.platform != "linux":
        return None
    ticks = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    per_second = os.sysconf("SC_CLK_TCK")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    idle = ticks[3] + ticks[4]
    return CoreSeconds(sum(ticks) / per_second, (sum(ticks) - idle) / per_second, children.ru_utime + children.ru_stime)


def others_share(before: CoreSeconds | None, after: CoreSeconds | None) -> float:
    """The share of the cores' time that went to other work than the engine's."""
    if before is None or after is None:
        return 0.0
    others = (after.used - before.used) - (after.ours - before.ours)
    return max(0.0, others / (after.total - before.total))


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
