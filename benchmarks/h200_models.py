"""Decode steps and prompts of models of several families on one H200, next to what the card's memory allows.

    python -m benchmarks.h200_models [--json OUT.json] [NAME ...]

Names are those of `hex-llm models`; weights are random, and every model has a process of its own. A decode step's floor
is the time in which memory gives what the step has to read: the weights, of experts those that are touched, which is
counted in steps of their own, and the keys and values within each layer's window. On a CPU, `--tiny` tries the script.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.h200_settings import MATMUL_TFLOPS
from hex_llm.catalog.chips import CHIPS

HBM_TBPS = CHIPS["h200"].bandwidth / 1e12
MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B", "google/gemma-2-9b", "mistralai/Mixtral-8x7B-v0.1")
FLAGS = ("--load_format=dummy", "--dtype=bfloat16", "--enable_chunked_prefill", "--no-warmup")
PROMPT = 8192  # tokens, where the model's context has them


@dataclasses.dataclass(frozen=True)
class Load:
    batch: int = 64
    context: int = 1500
    steps: int = 60
    settle: int = 150  # decoded before: prompts leave the card's clock low
    prompts: int = 4


TINY = Load(batch=4, context=64, steps=4, settle=4, prompts=2)
LIMIT_S = 150


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", default=list(MODELS), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--cache", type=Path, default=Path(".cache/h200_models"), help="where compiled steps are kept")
    parser.add_argument("--tiny", action="store_true", help="models with little in them, for a CPU")
    parser.add_argument("--part", choices=("time", "touched"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(measure(arguments.names[0], arguments.part, arguments.cache, tiny=arguments.tiny)))
        return 0
    found: dict[str, Any] = {}
    for name in arguments.names:
        found[name] = _measure_apart(name, arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(_table(found))
    return int(any("error" in result for result in found.values()))


def _measure_apart(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """In processes that end: what one model has taken of the device's memory, the next one needs."""
    result: dict[str, Any] = {}
    parts = ["touched", "time"] if _config(name).get("num_experts_per_tok") else ["time"]
    for part in parts:
        words = [sys.executable, "-m", "benchmarks.h200_models", name, f"--part={part}", f"--cache={arguments.cache}"]
        words += ["--tiny"] if arguments.tiny else []
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return result | {"error": f"{part}: more than {LIMIT_S} s"}
        if done.returncode:
            return result | {"error": f"{part}: {done.stderr[-1500:]}"}
        result |= json.loads(done.stdout.splitlines()[-1])
    if "step_ms" in result:
        experts = result.get("touched", 1.0) * result["expert_bytes"]
        result["floor_ms"] = (result["dense_bytes"] + experts + result["kv_bytes"]) / HBM_TBPS / 1e9
        result["share"] = result["floor_ms"] / result["step_ms"]
    return result


def measure(name: str, part: str, cache: Path, *, tiny: bool) -> dict[str, Any]:
    """Of one model, in this process."""
    if part == "touched":
        load = TINY if tiny else Load(steps=4, settle=4)
        touched = _count_touched(load.batch)
        # Apart: steps that tell nothing, kept by an earlier run, would be taken for those that tell.
        _decode(name, cache / part, tiny=tiny, load=load)
        return {"touched": touched()}
    load = TINY if tiny else Load()
    engine, arch = _decode(name, cache, tiny=tiny, load=load)
    from benchmarks.h200_step import finish, lengths, step_ms

    requests = list(engine._scheduler.running.values())
    before = lengths(requests)
    step = statistics.median(step_ms(engine, load.steps))
    contexts = (before + lengths(requests)) / 2
    finish(engine, requests)
    prompt = min(PROMPT, arch.max_position - 16) if not tiny else 64
    seconds = [_first_token_s(engine, prompt, seed) for seed in range(load.prompts)][1:]
    return {
        "step_ms": step,
        "prefill_tflops": _prefill_flops(arch, prompt) / statistics.median(seconds) / 1e12,
        "prompt_tokens": prompt,
        **_bytes(arch, contexts),
    }


def _config(name: str) -> dict[str, Any]:
    from hex_llm.catalog.entry import config_of
    from hex_llm.catalog.index import find

    entry = find(name)
    if entry is None:
        raise SystemExit(f"{name} is not one of those that `hex-llm models` lists.")
    return config_of(entry)


def _decode(name: str, cache: Path, *, tiny: bool, load: Load) -> tuple[Any, Any]:
    """An engine that decodes a batch of sequences of a length, and its model's numbers."""
    if tiny:
        os.environ["JAX_PLATFORMS"] = "cpu"
    from benchmarks.h200_settings import Sizes
    from benchmarks.h200_step import start_decodes, step_ms
    from hex_llm.build import build_engine, find_model
    from hex_llm.config import Config

    model = str(_write_tiny(name, cache)) if tiny else name
    length = max(PROMPT, load.context * 2) + 16 if not tiny else 256
    context = min(length, _config(name).get("max_position_embeddings", length))
    words = [f"--model={model}", f"--max_decode_seqs={load.batch}", f"--max_model_len={context}", *FLAGS]
    config = Config.from_args([*words, f"--compilation_cache_dir={cache}"])
    found = find_model(config)
    engine = build_engine(config, found)
    sizes = dataclasses.replace(Sizes(), step_context=load.context, settle_steps=load.settle)
    # Drawn and not the likeliest, or the sequences of random weights would come to say the same.
    start_decodes(engine, load.batch, sizes, load.steps, {"temperature": 1.0})
    step_ms(engine, 4)
    return engine, found.arch


def _write_tiny(name: str, cache: Path) -> Path:
    from benchmarks.h200_model import write_model

    small = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024}
    return write_model(cache / "tiny" / name.replace("/", "--"), _config(name) | small)


def _count_touched(batch: int) -> Any:
    """Has every layer tell which experts its tokens chose; the function says which share of them was touched."""
    import jax

    from hex_llm.models import mixtral

    shares: list[float] = []  # of each layer of each step of decodes
    route = mixtral.route_softmax

    def counted(x: Any, router: Any, *arguments: Any, **options: Any) -> Any:
        chosen, share = route(x, router, *arguments, **options)
        if chosen.shape[0] <= batch:
            jax.debug.callback(lambda each: shares.append(len(np.unique(each)) / router.shape[0]), chosen)
        return chosen, share

    mixtral.route_softmax = counted
    return lambda: float(np.mean(shares))


def _first_token_s(engine: Any, prompt_tokens: int, seed: int) -> float:
    from hex_llm.engine.admission import new_request
    from hex_llm.engine.request import SamplingParams

    tokens = np.random.default_rng(seed).integers(0, engine.limits.vocab_size, prompt_tokens).tolist()
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    request = new_request(f"prompt-{seed}", tokens, params, engine.limits)
    started = time.perf_counter()
    engine.add(request)
    while not any(engine.step()):
        pass
    seconds = time.perf_counter() - started
    while engine.has_work:
        engine.step()
    return seconds


def _bytes(arch: Any, contexts: np.ndarray) -> dict[str, float]:
    """What a decode step reads: weights that all tokens share, those of experts, keys and values."""
    from hex_llm.models.registry import family
    from hex_llm.models.split import Split
    from hex_llm.models.weights import specs

    sizes: dict[bool, int] = {True: 0, False: 0}
    for spec in specs(family(arch).weights, arch):
        # Of an embedding that is not the head too, a step reads a row for each token.
        if spec.parts[0].name != "model.embed_tokens.weight" or arch.tied:
            sizes[spec.stack is not None] += 2 * math.prod(spec.shape(Split(arch, 1)))
    token = 2 * 2 * arch.num_kv_heads * arch.head_dim
    seen = sum(np.minimum(contexts, kind.window.size if kind.window else np.inf).sum() for kind in arch.kinds)
    return {"dense_bytes": sizes[False], "expert_bytes": sizes[True], "kv_bytes": float(token * seen)}


def _prefill_flops(arch: Any, tokens: int) -> float:
    """Of a prompt: the weights that each token is multiplied with, and attention to the tokens before it."""
    from hex_llm.models.registry import family
    from hex_llm.models.split import Split
    from hex_llm.models.weights import specs

    active = 0.0
    for spec in specs(family(arch).weights, arch):
        shape = spec.shape(Split(arch, 1))
        if "vocab" not in spec.dims and len(shape) > 1:
            share = arch.experts_per_token / arch.num_experts if spec.stack else 1.0
            active += math.prod(shape) * share
    attention = 0.0
    for kind in arch.kinds:
        window = kind.window.size if kind.window else tokens
        seen = np.minimum(np.arange(1, tokens + 1), window).sum()
        attention += 4.0 * arch.num_heads * arch.head_dim * float(seen)
    return 2.0 * active * tokens + attention


def _table(found: Mapping[str, Mapping[str, Any]]) -> str:
    titles = {
        "model": -32,
        "step ms": 8,
        "floor ms": 9,
        "share": 6,
        "of 8B": 6,
        "touched": 8,
        "TFLOP/s": 16,
        "of 790": 7,
    }
    lines = [" ".join(f"{title:{'<' if width < 0 else '>'}{abs(width)}}" for title, width in titles.items())]
    base = found.get(MODELS[0], {}).get("share")
    for name, result in found.items():
        if "share" not in result:
            lines.append(f"{name:32} {result.get('error', 'nothing')[-300:]}")
            continue
        of_base = f"{result['share'] / base:6.3f}" if base else " " * 6
        touched = f"{result['touched']:8.3f}" if "touched" in result else " " * 8
        lines.append(
            f"{name:32} {result['step_ms']:8.3f} {result['floor_ms']:9.3f} {result['share']:6.3f} {of_base} {touched} "
            f"{result['prefill_tflops']:8.1f} {result['prefill_tflops'] / MATMUL_TFLOPS:7.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
