"""A program for the parity tests: models on some of eight virtual devices. Tasks come in as lines of JSON.

In a process of its own, because how many devices there are is settled when JAX starts.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
NUM_DEVICES = 8


class ManyDevices:
    """The near end of the process."""

    def __init__(self, folder: Path):
        self._out = folder / "logits.npy"
        flags = {
            "JAX_NUM_CPU_DEVICES": str(NUM_DEVICES),
            # With fewer threads than devices need, XLA's CPU backend can wait for itself.
            "NPROC": "40",
            "PJRT_NPROC": "40",
            # What is tested is what the programs mean, not how well they are compiled, which takes much longer.
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "PYTHONPATH": str(ROOT),
        }
        self._errors = (folder / "stderr.txt").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parity.many_devices"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=os.environ | flags,
        )

    def logits(self, folder: Path, num_devices: int) -> np.ndarray:
        """As `test_logits.logits_of`."""
        self._ask("logits", str(folder), num_devices, str(self._out))
        return np.load(self._out)

    def adapted_logits(self, folder: Path, num_devices: int, adapters: Sequence[Path], slots: list[int]) -> np.ndarray:
        """As `test_adapters.adapted_logits`."""
        self._ask("adapted_logits", str(folder), num_devices, [str(each) for each in adapters], slots, str(self._out))
        return np.load(self._out)

    def greedy(
        self,
        folder: Path,
        num_devices: int,
        prompts: Sequence[Sequence[int]],
        length: int,
        kv_cache_dtype: str = "auto",
    ) -> list[list[int]]:
        """What an engine goes on with after the prompts."""
        return self._ask("greedy", str(folder), num_devices, prompts, length, kv_cache_dtype)

    def chosen(self, folder: Path, num_devices: int) -> list[list[int]]:
        """What an engine with programs as accelerators have them answers requests of every kind, alone and together."""
        return self._ask("chosen", str(folder), num_devices)

    def moved(self, folder: Path, from_devices: int, to_devices: int, **flags: str) -> list[str]:
        """As `blocks_between.problems`."""
        return self._ask("moved", str(folder), from_devices, to_devices, flags)

    def _ask(self, *task: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, Path(self._errors.name).read_text()[-2000:]
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()


def _logits(folder: str, num_devices: int, out: str) -> None:
    from tests.parity.test_logits import load_model, logits_of

    np.save(out, logits_of(*load_model(Path(folder), num_devices=num_devices)))


def _adapted_logits(folder: str, num_devices: int, adapters: list[str], slots: list[int], out: str) -> None:
    from tests.parity.test_adapters import adapted_logits

    np.save(out, adapted_logits(Path(folder), [Path(each) for each in adapters], slots, num_devices=num_devices))


def _greedy(
    folder: str, num_devices: int, prompts: list[list[int]], length: int, kv_cache_dtype: str
) -> list[list[int]]:
    from hex_llm.engine.request import SamplingParams
    from tests.runner.engines import make_engine, run, tokens

    sampling = SamplingParams(temperature=0, max_tokens=length)
    flags = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype, "tensor_parallel_size": num_devices}
    engine = make_engine(Path(folder), enable_chunked_prefill=True, **flags)
    return [tokens(outputs) for outputs in run(engine, *[(prompt, sampling) for prompt in prompts])]


def _chosen(folder: str, num_devices: int) -> list[list[int]]:
    from hex_llm import build
    from hex_llm.engine.request import SamplingParams
    from hex_llm.runner.buckets import SEPARATE
    from tests.runner.engines import make_engine, run, tokens

    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "logit_bias": {17: 2.5}, "frequency_penalty": 0.5},
        {},
        {"top_k": 5, "min_p": 0.01},
        {"top_p": 0.9, "repetition_penalty": 1.2, "prompt_logprobs": 1},
    ]
    asked = [([5 + i] * (1 + 4 * i), SamplingParams(seed=i, max_tokens=8, **kind)) for i, kind in enumerate(kinds)]
    before, build.TOGETHER = build.TOGETHER, SEPARATE
    try:
        engine = make_engine(Path(folder), dtype="float32", tensor_parallel_size=num_devices)
    finally:
        build.TOGETHER = before
    alone = [tokens(outputs) for each in asked for outputs in run(engine, each)]
    return [*alone, *(tokens(outputs) for outputs in run(engine, *asked))]


def _moved(folder: str, from_devices: int, to_devices: int, flags: dict[str, str]) -> list[str]:
    from tests.runner.blocks_between import problems
    from tests.runner.engines import make_copying_engine

    source, target = (
        make_copying_engine(Path(folder), tensor_parallel_size=number, **flags)._runner
        for number in (from_devices, to_devices)
    )
    return problems(source, target)


_TASKS: dict[str, Any] = {
    "logits": _logits,
    "adapted_logits": _adapted_logits,
    "greedy": _greedy,
    "chosen": _chosen,
    "moved": _moved,
}


def main() -> None:
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": _TASKS[name](*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
