"""The experts of a layer on an H200, with weights in few bits beside bf16: JSON lines, in microseconds.

    python -m benchmarks.h200_experts [--only mixtral-int4,gpt-oss-mxfp4] [--tokens 1,64] [--seconds 100]

The weights of bf16 are those that the codes stand for, so that `difference`, that of the results as a share of their
length, is nothing but the order of sums and what is rounded on the way.
"""

import argparse
import functools
import json
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.h200_clock import CHAIN, require_gpu, seconds
from hex_llm.kernels.activation import Activation
from hex_llm.kernels.grouped_matmul import gpu
from hex_llm.kernels.quant_matmul import gpu_expert_layout
from hex_llm.kernels.quant_matmul.gpu_layout import WHOLE
from hex_llm.kernels.quant_matmul.reference import dequantize
from hex_llm.kernels.quant_matmul.weight import Codes, Coding, Packed

TOKENS = (1, 16, 64, 128, 2048)


class Case(NamedTuple):
    num_experts: int
    k: int
    width: int
    size: int
    coding: Coding
    group: int | None
    activation: Activation = "silu"


CASES = {
    "mixtral-int4": Case(8, 2, 4096, 14336, "int4", 128),
    "gpt-oss-mxfp4": Case(32, 4, 2880, 2880, "mxfp4", 32, "clamped_silu"),
    "qwen3-int4": Case(128, 8, 2048, 768, "int4", 128),
    "mixtral-int8": Case(8, 2, 4096, 14336, "int8", None),
    "mixtral-fp8": Case(8, 2, 4096, 14336, "fp8", None),
    "mixtral-nf4": Case(8, 2, 4096, 14336, "nf4", 64),
}


@functools.partial(jax.jit, static_argnames=("case", "out", "size"))
def made(seed: Array, *, case: Case, out: int, size: int) -> tuple[Packed, Array]:
    """The experts' weights in few bits, and in bf16."""
    first, second, third = jax.random.split(jax.random.key(seed), 3)
    low, high, dtype = (-128, 128, jnp.int8) if case.coding == "int8" else (0, 16, jnp.uint8)
    rows = case.num_experts, out
    groups = 1 if case.group is None else size // case.group
    scale = jax.random.uniform(second, (*rows, groups), jnp.float32, 0.5, 2) / (high * size**0.5)
    scale = 2.0 ** jnp.floor(jnp.log2(scale)) if case.coding == "mxfp4" else jax.lax.reduce_precision(scale, 8, 7)
    zero = None
    if case.group is not None and case.coding in WHOLE:
        zero = jax.random.randint(third, (*rows, groups), 6, 10).astype(jnp.float32)
    values = jax.random.randint(first, (*rows, size), low, high, dtype)
    if case.coding == "fp8":
        values = (2 * values.astype(jnp.bfloat16) - high).astype(jnp.float8_e4m3fn)
    codes = Codes(values, scale, zero, None, None, case.coding)
    return gpu_expert_layout.pack(codes), dequantize(codes).astype(jnp.bfloat16)


def measure(case: Case, counts: list[int], weights: dict[str, Any], said: dict[str, Any], until: float) -> None:
    for count in counts:
        if time.perf_counter() > until:
            return
        x = jax.random.normal(jax.random.key(count), (count, case.width), jnp.bfloat16)
        scores = jax.random.uniform(jax.random.key(1), (count, case.num_experts))
        share, chosen = jax.lax.top_k(scores, case.k)
        bias = jnp.zeros((case.num_experts, 2 * case.size), jnp.bfloat16)
        times, results = {}, {}
        for name, (gate_up, down) in weights.items():
            arguments = x, gate_up, bias if case.activation == "clamped_silu" else None, down, chosen, share
            run = functools.partial(gpu.experts, activation=case.activation)
            compiled = jax.jit(run).lower(*arguments).compile(compiler_options=CHAIN)
            times[name] = round(1e6 * seconds(compiled, *arguments, repeats=20 if count <= 128 else 5, trials=3), 1)
            results[name] = jnp.sum(compiled(*arguments).astype(jnp.float32), axis=0)[:count]
        bf16, few = results.values()
        difference = float(jnp.linalg.norm(few - bf16) / jnp.linalg.norm(bf16))
        ratio = round(times["few_bits"] / times["bf16"], 3)
        print(
            json.dumps(said | {"tokens": count, **times, "ratio": ratio, "difference": round(difference, 5)}),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--seconds", type=float, default=600, help="begin no measurement after so many")
    options = parser.parse_args()
    require_gpu()
    until = time.perf_counter() + options.seconds
    for name in options.only.split(","):
        case = CASES[name]
        gate_up = made(jnp.int32(1), case=case, out=2 * case.size, size=case.width)
        down = made(jnp.int32(2), case=case, out=case.width, size=case.size)
        packed, wide = zip(gate_up, down, strict=True)
        weights = {"bf16": wide, "few_bits": packed}
        measure(case, [int(count) for count in options.tokens.split(",")], weights, {"case": name}, until)


if __name__ == "__main__":
    main()
