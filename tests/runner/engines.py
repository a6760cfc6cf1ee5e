"""Real engines on tiny models, for tests."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hex_llm.build import build_engine, find_model
from hex_llm.config import Config
from hex_llm.engine.admission import new_request
from hex_llm.engine.engine import Engine
from hex_llm.engine.output import Output
from hex_llm.engine.request import SamplingParams

# Few and small shapes: what a test waits for is compilation. It happens as steps need it, unless a test says otherwise.
SMALL = {
    "max_model_len": 96,
    "num_blocks": 64,
    "block_size": 8,
    "max_decode_seqs": 8,
    "prefill_len_padding": 32,
    "max_num_batched_tokens": 64,
    "decode_blocks_padding": 1,
    "warmup": False,
    "compilation_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR", ""),
}


def make_engine(folder: Path, **flags: Any) -> Engine:
    config = Config(model=str(folder), **SMALL | flags)
    return build_engine(config, find_model(config))


def make_copying_engine(folder: Path, **flags: Any) -> Engine:
    """One that also copies blocks, as those do that hand requests over."""
    config = Config(model=str(folder), **SMALL | flags)
    object.__setattr__(config, "disagg_topo", "1,1")  # behind the back of what would check the number of devices
    return build_engine(config, find_model(config))


def sharing(engine: Engine, *, max_in_flight: int = 1, **limits: Any) -> Engine:
    """Another engine, under tighter limits, on the device and with the compiled steps of an idle one."""
    assert not engine.has_work
    return Engine(engine._runner, dataclasses.replace(engine.limits, **limits), max_in_flight=max_in_flight)


def run(
    engine: Engine, *asked: tuple[Sequence[int], SamplingParams], seed: int = 0, aborts: Mapping[int, int] | None = None
) -> list[list[Output]]:
    """Runs requests together; returns the outputs of each. `aborts` says after how many steps which are ended."""
    ids = [f"request-{number}" for number in range(len(asked))]
    for id, (prompt, sampling) in zip(ids, asked, strict=True):
        engine.add(new_request(id, prompt, sampling, engine.limits, end_ids=(), seed=seed))
    outputs: dict[str, list[Output]] = {id: [] for id in ids}
    step = 0
    while engine.has_work:
        if aborts and step in aborts:
            engine.abort(ids[aborts[step]])
        for output in engine.step():
            outputs[output.request_id].append(output)
        step += 1
    engine.check()
    return [outputs[id] for id in ids]


def tokens(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]
