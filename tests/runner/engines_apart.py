"""A program for test_engines_apart.py: engines on devices of their own in one process, and what they touch beside."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "NPROC": "32"}

import jax

from hex_llm.build import build_engine, find_model
from hex_llm.config import Config
from hex_llm.engine.engine import Engine
from hex_llm.engine.request import SamplingParams
from hex_llm.runner.runner import DeviceRunner
from hex_llm.transfer.offers import HERE, take_here
from tests.runner.blocks_between import problems
from tests.runner.engines import SMALL, run, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=6)
ASKED = (
    ([5, 6, 7] * 9, GREEDY),
    ([9] * 20, SamplingParams(temperature=1, seed=7, top_k=20, max_tokens=6, repetition_penalty=1.2, logprobs=2)),
)
# The devices of each engine, and how it differs from the others.
PLACES = [((0,), {}), ((1,), {}), ((2, 3), {}), ((3,), {"load_format": "dummy"})]


def make(folder: str, devices: tuple[int, ...], **flags: Any) -> Engine:
    flags = SMALL | {"dtype": "float32", "warmup": True, "tensor_parallel_size": len(devices)} | flags
    config = Config(model=folder, **flags)
    object.__setattr__(config, "disagg_topo", "1,1")  # so that it can copy blocks
    return build_engine(config, find_model(config), devices=devices)


def devices_of(arrays: Iterable[jax.Array]) -> list[int]:
    return sorted({device.id for array in arrays for device in array.devices()})


@contextmanager
def watched(seen: set[int]) -> Iterator[None]:
    """Notes the devices on which a program is run, or an array is made, whether it stays or not."""
    from jax._src import compiler

    loaded = compiler.compile_or_get_cached

    def compile_or_get_cached(*arguments: Any, **keywords: Any) -> Any:
        executable = loaded(*arguments, **keywords)
        seen.update(device.id for device in executable.local_devices())
        return executable

    compiler.compile_or_get_cached = compile_or_get_cached
    try:
        yield
    finally:
        compiler.compile_or_get_cached = loaded


def compiled_for(pairs: Iterable[tuple[DeviceRunner, DeviceRunner]]) -> list[str]:
    """What is compiled when blocks go from one engine to another, in parts of every size."""
    parts = [(source.copy_out([1] * size), target) for source, target in pairs for size in target.staging.counts]
    compiled: list[str] = []

    def note(name: str, seconds: float, **about: Any) -> None:
        if name.endswith("/backend_compile_duration"):
            compiled.append(str(about))

    jax.monitoring.register_event_duration_secs_listener(note)
    for pages, target in parts:
        take_here(HERE.offer(pages), target.staging)
    return [*compiled]


def main(folder: str) -> None:
    engines, told = [], []
    for devices, flags in PLACES:
        before = jax.live_arrays()
        seen: set[int] = set()
        with watched(seen), jax.transfer_guard_device_to_device("disallow"):
            engine = make(folder, devices, **flags)
            answers = [tokens(each) for each in run(engine, *ASKED)]
        runner = engine._runner
        known = set(map(id, before))
        told.append({
            "wanted": [*devices],
            "state": devices_of(jax.tree.leaves((runner._params, runner._kv, runner._slots, runner._history))),
            "new": devices_of(array for array in jax.live_arrays() if id(array) not in known),
            "ran on": sorted(seen),
            "answers": answers,
        })  # fmt: skip
        engines.append(engine)
    again = [tokens(each) for each in run(engines[0], *ASKED)]
    one, other, two, _ = (engine._runner for engine in engines)
    pairs = [(one, other), (one, two), (other, two), (two, one)]
    compiled = compiled_for(pairs)
    moved = [problem for source, target in pairs for problem in problems(source, target)]
    print(json.dumps({"engines": told, "again": again, "moved": moved, "compiled": compiled}))


if __name__ == "__main__":
    main(sys.argv[1])
