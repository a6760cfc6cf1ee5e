"""What tensor parallelism makes devices send each other: read from compiled steps, beside what a formula says.

    python -m benchmarks.tp_overhead [MODEL ...] [--tp 8] [--json] [--steps decode ...]

Steps are compiled for virtual CPU devices at the models' real sizes, but of two layers and in float32 (XLA's CPU
backend would widen sums of bfloat16): nothing is loaded, and nothing runs. The formula: in each layer the devices add
up two arrays [tokens, embed], and one more behind the embedding; on a ring, to add up n bytes over t devices makes each
send 2 (t - 1) / t n bytes. A step that decodes and is greedy sends the likeliest token of each device's part of the
vocabulary; one that draws, all of the logits.
"""

import argparse
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

LAYERS = 2
DECODES = 64
PROMPT = 512
STEPS = ("decode", "prompt", "choose greedy", "choose drawn")
MODELS = (
    "meta-llama/Llama-3.1-8B",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B",
    "microsoft/Phi-3-mini-4k-instruct",
    "google/gemma-7b",
    "google/gemma-2-27b",
    "google/gemma-3-4b-it",
    "meta-llama/Llama-4-Scout-17B-16E",
    "openai/gpt-oss-20b",
    "HuggingFaceTB/SmolLM3-3B",
)


def measure(name: str, num_devices: int, steps: Sequence[str] = STEPS) -> Iterator[dict[str, Any]]:
    """One row for each step: what its collectives are, and what they should be."""
    import jax.numpy as jnp

    from hex_llm.build import find_model
    from hex_llm.config import Config
    from hex_llm.models.abstract import abstract
    from hex_llm.models.registry import family
    from hex_llm.parallel.collectives import collectives
    from hex_llm.parallel.mesh import make_mesh
    from hex_llm.runner.buckets import Bucket, Variant
    from hex_llm.runner.layout import Shapes
    from hex_llm.runner.lowering import Lowering
    from hex_llm.runner.programs import Choose, Forward, Programs

    model = find_model(Config(model=name, load_format="dummy"))
    arch = dataclasses.replace(model.arch, kinds=model.arch.kinds[:LAYERS])
    mesh = make_mesh(num_devices)
    shapes = Shapes(
        num_slots=DECODES,
        page_size=32,
        table_width=128,
        num_pages=64,
        max_fresh=8,
        mixed_tokens=PROMPT,
        max_model_len=4096,
        vocab_size=arch.vocab_size,
        has_long=arch.rope_switch is not None,
    )
    params = abstract(family(arch).weights, arch, mesh, jnp.float32)
    lowering = Lowering(Programs(arch, shapes, params, jnp.float32, mesh), None)

    programs = {
        "decode": Forward(Bucket(DECODES, DECODES, DECODES, True)),
        "prompt": Forward(Bucket(PROMPT, 8, DECODES, False)),
        "choose greedy": Choose(DECODES, Variant.GREEDY),
        "choose drawn": Choose(DECODES, Variant.DRAWN),
    }
    expected = {
        "decode": ("all-reduce", 2 * LAYERS + 1, DECODES * arch.embed_size),
        "prompt": ("all-reduce", 2 * LAYERS + 1, PROMPT * arch.embed_size),
        "choose greedy": ("all-gather", 2, DECODES * num_devices),
        "choose drawn": ("all-gather", 1, DECODES * _padded(arch, num_devices)),
    }
    for step in steps:
        found = collectives(lowering.lower(programs[step]).compile().as_text() or "")
        kind, count, words = expected[step]
        yield {
            "model": name,
            "tp": num_devices,
            "step": step,
            "found": sorted([each.kind, each.bytes] for each in found),
            "expected": [[kind, 4 * words]] * count,
            "sent_per_layer": sum(each.sent for each in found if each.name.count("jit(") > 1) / LAYERS,
            "sent": sum(each.sent for each in found),
        }


def _padded(arch: Any, num_devices: int) -> int:
    return -(-arch.vocab_size // num_devices) * num_devices


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--steps", nargs="+", default=STEPS, choices=STEPS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(arguments.tp), "NPROC": "40", "PJRT_NPROC": "40"}
    for name in arguments.models:
        for row in measure(name, arguments.tp, arguments.steps):
            print(json.dumps(row) if arguments.json else _line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    agrees = "as the formula says" if row["found"] == row["expected"] else f"NOT {row['expected']}"
    return (
        f"{row['model']:<36} TP {row['tp']}  {row['step']:<14} {_counted(row['found']):<30} "
        f"{row['sent_per_layer'] / 2**20:8.3f} MiB sent a layer, {row['sent'] / 2**20:8.3f} in all: {agrees}"
    )


def _counted(found: Sequence[Sequence[Any]]) -> str:
    kinds = Counter(map(tuple, found))
    return ", ".join(f"{count} {kind} of {size}" for (kind, size), count in kinds.items())


if __name__ == "__main__":
    main()
