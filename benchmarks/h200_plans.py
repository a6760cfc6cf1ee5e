"""Every plan of a product with 4-bit weights, timed side by side on an H200: what `gpu_plan`'s figures are put down by.

    python -m benchmarks.h200_plans --seconds 150 [--codings w4a8] [--tokens 64 8192] [--shapes gate_up 70b_down]

Each case is a JSON line: microseconds of each plan, the fastest first, the place among them of the one that is chosen,
and how far from the reference the result is, in shares of its length. First, for w4a8, that distance is told with
tokens whose mean is as large as what they differ by: sums in the tensor cores have fewer bits than float32's.
"""

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.h200_clock import require_gpu
from benchmarks.h200_quant import (
    DOWN,
    GATE_UP,
    OUT,
    QKV,
    as_taken,
    distance_of,
    new_weight,
    new_x,
    num_weights,
    pack,
    random_codes,
    timed,
)
from hex_llm.kernels.activation import Activation
from hex_llm.kernels.matmul.reference import total
from hex_llm.kernels.quant_matmul import gpu
from hex_llm.kernels.quant_matmul.gpu_plan import BF16, FP8, Pace, Plan, plan_for, plan_for_many, plans, plans_for_many
from hex_llm.kernels.quant_matmul.weight import Codes, Coding, Packed

SHAPES_OF_8B = {"gate_up": GATE_UP, "qkv": QKV, "out": OUT, "down": DOWN}
SHAPES = SHAPES_OF_8B | {
    "70b_gate_up": (57344, 8192), "70b_qkv": (10240, 8192), "70b_out": (8192, 8192), "70b_down": (8192, 28672),
}  # fmt: skip
CODINGS: tuple[Coding, ...] = ("w4a8", "int4")
GROUP = 128
WIDEST = 3  # of the plans that cut tokens, those with the largest pieces of so many sizes


class Case(NamedTuple):
    coding: Coding
    name: str
    tokens: int

    @property
    def shape(self) -> tuple[int, int]:
        return SHAPES[self.name]

    @property
    def is_few(self) -> bool:
        return self.tokens <= gpu.MAX_TOKENS

    @property
    def activation(self) -> Activation | None:
        return "silu" if self.name.endswith("gate_up") and self.is_few else None

    def product(self, x: Any, weight: Packed, plan: Plan | None = None) -> Array:
        if self.is_few:
            return gpu.parts(x, weight, plan=plan, activation=self.activation)
        return gpu.matmul(x, weight, plan=plan)

    def plans(self) -> list[Plan]:
        if self.is_few:
            return list(plans(self.tokens, *self.shape, gated=self.activation is not None))
        found = list(plans_for_many(self.tokens, self.shape[0], pace=self.pace))
        sizes = sorted({each.tokens or 0 for each in found})
        widest = [each for each in found if each.tokens in sizes[-WIDEST:]]
        return list(dict.fromkeys([self.chosen(), *widest]))

    def chosen(self) -> Plan:
        if self.is_few:
            return plan_for(self.tokens, *self.shape, pace=self.pace, gated=self.activation is not None)
        return plan_for_many(self.tokens, *self.shape, pace=self.pace)

    @property
    def pace(self) -> Pace:
        return FP8 if self.coding == "w4a8" else BF16


def runs(case: Case, pool: ThreadPoolExecutor) -> dict[Plan, Any]:
    """What tells the seconds of each plan, while it is compiled."""
    weight = jax.eval_shape(lambda: new_weight(case.coding, GROUP, case.shape, 0))
    x = jax.eval_shape(as_taken, jax.ShapeDtypeStruct((case.tokens, case.shape[1]), jnp.bfloat16), weight)

    def compiled(plan: Plan) -> Any:
        return timed(lambda x, weight: case.product(x, weight, plan), x, [weight] * num_weights(case.tokens))

    return {plan: pool.submit(compiled, plan) for plan in case.plans()}


def measure(case: Case, compiled: dict[Plan, Any]) -> dict[str, Any]:
    weights = [new_weight(case.coding, GROUP, case.shape, seed) for seed in range(num_weights(case.tokens))]
    x, chosen = as_taken(new_x(case.shape, case.tokens), weights[0]), case.chosen()
    took = {plan: 1e6 * run.result()(x, weights) for plan, run in compiled.items()}
    order = sorted(took, key=lambda plan: took[plan])
    codes = random_codes(case.coding, GROUP, case.shape, 0)
    return case._asdict() | {
        "us": {said(plan): round(took[plan], 1) for plan in order},
        "chosen": order.index(chosen) + 1,
        "lost": round(took[chosen] / took[order[0]] - 1, 3),
        "error": round(distance(case, new_x(case.shape, case.tokens), weights[0], codes), 5),
    }


def said(plan: Plan) -> str:
    pieces = f" of {plan.tokens}" if plan.tokens else f" in {plan.splits}" * (plan.splits > 1)
    return f"{plan.workers}x{plan.stack}{pieces}" + " even" * plan.even


def distance(case: Case, x: Array, weight: Packed, codes: Codes) -> float:
    got = case.product(x, weight)
    return distance_of((total(got) if case.is_few else got)[: x.shape[0]], x, codes, case.activation)


def shifted() -> Iterator[dict[str, Any]]:
    """With tokens of one sign, and zeros in the middle of the codes, what cancels is as large as it can be."""
    codes = random_codes("w4a8", GROUP, DOWN, 0)
    assert codes.zero is not None
    codes = dataclasses.replace(codes, zero=jnp.full_like(codes.zero, 8))
    weight, case = jax.jit(pack)(codes), Case("w4a8", "down", 64)
    for mean in (0.0, 1.0, 4.0):
        x = new_x(DOWN, case.tokens) + jnp.bfloat16(mean)
        yield {"mean_of_tokens": mean, "error": round(distance(case, x, weight, codes), 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Every plan of a product with 4-bit weights on an H200.")
    parser.add_argument("--seconds", type=float, default=300, help="no case is begun after so long")
    parser.add_argument("--codings", nargs="+", choices=CODINGS, default=CODINGS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES_OF_8B))
    options = parser.parse_args()
    require_gpu()
    end = time.monotonic() + options.seconds
    cases = list(itertools.starmap(Case, itertools.product(options.codings, options.shapes, options.tokens)))
    with ThreadPoolExecutor(8) as pool:  # before anything is timed: it would share the host
        compiled = [runs(case, pool) for case in cases]
    if "w4a8" in options.codings:
        for row in shifted():
            print(json.dumps(row), flush=True)
    for case, plans_of_it in zip(cases, compiled, strict=True):
        left_out = {"left_out": case._asdict()}
        print(json.dumps(left_out if time.monotonic() > end else measure(case, plans_of_it)), flush=True)


if __name__ == "__main__":
    main()
