"""Adapters on one H200: an 8B of random bf16 weights serves the model alone, then 16 adapters of rank 16, then twice as
many adapters as it has places for, so that some are loaded all the time.

    python -m benchmarks.h200_lora --json lora.json [--clients 64] [--prompts 128] [--budget-s 400]

One server, one after the other; figures are those of `hex-llm bench serve`.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.h200_few_bits import SERVE_FLAGS, SMALL, TINY_FLAGS, bench_serve
from benchmarks.h200_http import running
from benchmarks.h200_model import write_model
from benchmarks.h200_settings import LLAMA_8B

PLACES, RANK = 16, 16


def modules(shape: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(name, in, out) of all that an adapter can change."""
    size, inner = shape["hidden_size"], shape["intermediate_size"]
    head = shape.get("head_dim") or size // shape["num_attention_heads"]
    heads, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (size, heads),
        "self_attn.k_proj": (size, kv),
        "self_attn.v_proj": (size, kv),
        "self_attn.o_proj": (heads, size),
        "mlp.gate_proj": (size, inner),
        "mlp.up_proj": (size, inner),
        "mlp.down_proj": (inner, size),
    }
    for layer, (name, both) in itertools.product(range(shape["num_hidden_layers"]), sizes.items()):
        yield f"model.layers.{layer}.{name}", *both


def write_adapter(folder: Path, shape: Mapping[str, Any], seed: int) -> Path:
    """As PEFT writes it, with numbers that change little."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)

    def numbers(*sizes: int) -> np.ndarray:
        return (rng.random(sizes, np.float32) * 0.01 - 0.005).astype(ml_dtypes.bfloat16)

    tensors = {}
    for name, size, out in modules(shape):
        tensors[f"base_model.model.{name}.lora_A.weight"] = numbers(RANK, size)
        tensors[f"base_model.model.{name}.lora_B.weight"] = numbers(out, RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    names = sorted({name.rpartition(".")[2] for name, _, _ in modules(shape)})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shape", choices=("full", "tiny"), default="full", help="tiny: to see on a CPU that it works")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "h200_lora")
    parser.add_argument("--budget-s", type=float, default=400)
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget_s
    results: dict[str, Any] = {}
    tiny = options.shape == "tiny"
    shape, flags, tokens = (SMALL, TINY_FLAGS, (40, 20)) if tiny else (LLAMA_8B, SERVE_FLAGS, (1000, 1000))
    model = write_model(options.folder / options.shape, shape)
    names = [f"adapter{number}" for number in range(2 * PLACES)]
    with ThreadPoolExecutor() as pool:
        folders = list(
            pool.map(lambda name: write_adapter(options.folder / options.shape / name, shape, names.index(name)), names)
        )
    sources = ",".join(f"{name}={folder}" for name, folder in zip(names, folders, strict=True))
    flags = [*flags, "--enable_lora", f"--max_lora_rank={RANK}", f"--max_num_mem_cached_lora={PLACES}"]
    with (
        tempfile.TemporaryDirectory() as name,
        running(
            model,
            options.folder / "cache",
            [*flags, f"--lora_modules={sources}"],
            (folder := Path(name)) / "server.log",
            timeout_s=options.budget_s,
        ) as server,
    ):
        results["ready_s"] = round(server.ready_s, 1)
        for what, asked in {"base": [], "16 adapters": names[:PLACES], "32 adapters": names}.items():
            if time.monotonic() < deadline:
                more = [f"--lora_modules={','.join(asked)}"] if asked else []
                found = bench_serve(server, model, (options.clients, options.prompts), tokens, folder, deadline, more)
                results[what] = found
                base = results["base"].get("output_throughput")
                if base and "output_throughput" in found:
                    found["of the base"] = round(found["output_throughput"] / base, 3)
                print(f"{what}: {json.dumps(found)}", flush=True)
                options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
