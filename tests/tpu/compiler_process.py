"""The TPU compiler in a process of its own: programs' names come in as lines of JSON, what it says of them goes out.

Runs in the environment that `scripts/setup tpu` makes.
"""

import importlib
import json
import os
import re
import sys
import time
from pathlib import Path

from jax.experimental import topologies

# One chip. Otherwise the name says how many there are.
ONE = {
    "v4": "v4:1x1x1",
    "v5e": "v5e:1x1",
    "v5p": "v5p:1x1x1",
    "v6e": "v6e:1x1",
    "tpu7x": "tpu7x:1x1x1",
}


def devices_of(topology: str) -> list:
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if topology in ONE else {}
    name = ONE.get(topology, topology)
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds).devices


def compile_program(program: str, topology: str, arguments: dict, text: str) -> dict:
    module, _, function = program.rpartition(".")
    lowered = getattr(importlib.import_module(module), function)(devices_of(topology), **arguments)
    began = time.monotonic()
    try:
        compiled = lowered.compile()
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    seconds = time.monotonic() - began
    Path(text).write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    return {
        "seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "kernels": re.findall(r'%([\w.-]+) = [^\n]*custom_call_target="tpu_custom_call"', compiled.as_text()),
    }


def main() -> None:
    # Whatever the libraries print, in Python or not, must not pass for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    devices_of("v5e")
    print(json.dumps({"result": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = compile_program(**json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
