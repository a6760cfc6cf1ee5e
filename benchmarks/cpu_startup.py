"""From the start of a process to the first token of the embedded model, with the default flags, and where it goes.

    python benchmarks/cpu_startup.py --repeats 3

Three kinds of start, each a process of its own that builds the engine alone, without a server:

* fresh: nothing is kept from before, neither compiled steps nor Python's bytecode (an installer may leave none);
* cold: no compiled steps;
* warm: both are there.

Each figure is a least and a median over the repeats, in seconds. The upper part adds up to the total. Below it is what
threads did meanwhile, side by side with that and with each other, and the processor's time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

PROJECT = Path(__file__).parents[1]
THREADS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling, or reading what was compiled",
}


def child(cache: str, started: float) -> None:
    """Starts an engine, computes a token, and prints the seconds of each phase."""
    seconds: dict[str, float] = {}
    last = started

    def ended(phase: str) -> None:
        nonlocal last
        now = time.monotonic()
        seconds[phase] = seconds.get(phase, 0.0) + now - last
        last = now

    ended("starting Python")
    import jax

    from hex_llm.build import build_engine, find_model
    from hex_llm.config import Config
    from hex_llm.engine.admission import new_request
    from hex_llm.engine.request import SamplingParams

    ended("importing")
    threads: dict[str, float] = defaultdict(float)

    def heard(event: str, duration_secs: float, **_: str | int) -> None:
        threads[event] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(heard)
    config = Config(compilation_cache_dir=cache)
    model = find_model(config)
    ended("reading config.json")
    # What passes before a phase's first word belongs to the preparations, what passes after it to the phase.
    engine = build_engine(config, model, lambda phase, share: ended(phase if share else "preparing"))
    ended("preparing")
    engine.add(new_request("first", [5, 6, 7], SamplingParams(temperature=0, max_tokens=1), engine.limits))
    while engine.has_work:
        engine.step()
    ended("first token")
    seconds["total"] = last - started
    seconds |= {words: threads[name] for name, words in THREADS.items()}
    seconds["processor"] = sum(os.times()[:2])
    print(json.dumps(seconds))


def start(compiled: Path, bytecode: Path) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(bytecode), "PYTHONPATH": str(PROJECT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--child", str(compiled), str(time.monotonic())]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=("fresh", "cold", "warm"), default=("fresh", "cold", "warm"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], float(arguments.child[1]))
        return
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch)
        start(kept / "compiled", kept / "bytecode")  # fills both
        for number in range(arguments.repeats):
            new = kept / str(number)
            places = {
                "fresh": (new / "fresh", new / "bytecode"),
                "cold": (new / "cold", kept / "bytecode"),
                "warm": (kept / "compiled", kept / "bytecode"),
            }
            for kind in arguments.kinds:
                runs[kind].append(start(*places[kind]))
    print(f"| seconds, least / median of {arguments.repeats} | " + " | ".join(runs) + " |")
    print("|---" * (1 + len(runs)) + "|")
    for row in next(iter(runs.values()))[0]:
        values = [[run[row] for run in several] for several in runs.values()]
        print(f"| {row} | " + " | ".join(f"{min(each):.2f} / {statistics.median(each):.2f}" for each in values) + " |")


if __name__ == "__main__":
    main()
