"""What bounds a product with 4-bit weights on an H200: one is timed cut in several ways, and with parts left out; then
it runs for a while, beside others, and the driver tells the clock and the power.

    python -m benchmarks.h200_quant_parts --seconds 100 [--codings w4a8]

Each case is a JSON line. What lacks a part computes nonsense, at the speed of the rest: `decode` leaves the codes as
they are, `zeros` leaves out what subtracts their zeros (of int4 also what brings them to size, one instruction in
three, as if scale and zero were one), `products` decodes and does not multiply. `with_norm_us` has the kernel behind
it, too, which adds up what the product left in parts.
"""

import argparse
import contextlib
import functools
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from benchmarks.h200_clock import require_gpu
from benchmarks.h200_fp8 import fp8_weight
from benchmarks.h200_quant import (
    DOWN,
    GATE_UP,
    OUT,
    QKV,
    as_taken,
    new_weight,
    new_x,
    plain_product,
    plain_time,
    timed,
)
from hex_llm.kernels.activation import Activation
from hex_llm.kernels.matmul import add_norm_gpu
from hex_llm.kernels.matmul.reference import total
from hex_llm.kernels.quant_matmul import (
    gpu,
    gpu_decode,
    gpu_eight_bits,
    gpu_layout,
    gpu_w4a8_decode,
    gpu_w4a8_multiply,
    reference,
)
from hex_llm.kernels.quant_matmul.gpu_layout import CHUNK, VECTOR, Grouping
from hex_llm.kernels.quant_matmul.gpu_plan import Plan
from hex_llm.kernels.quant_matmul.rows import Tokens
from hex_llm.kernels.quant_matmul.weight import HOPPER_ROWS, Coding, Packed
from hex_llm.kernels.rms import Rms

GATE_UP_70B, QKV_70B = (57344, 8192), (10240, 8192)
GROUP = 128
WEIGHTS = 8  # of a shape, so that no cache holds them
STEADY_S = 2.0
SAMPLE_MS = 50


class Case(NamedTuple):
    shape: tuple[int, int]
    tokens: int
    plan: Plan
    without: str = ""
    activation: Activation | None = None
    coding: Coding = "int4"


def w4a8_cases() -> Iterator[Case]:
    for tokens, plan in ((64, Plan(workers=2, stack=2)), (8192, Plan(workers=2, stack=1, tokens=128))):
        for without in ("", "zeros", "decode", "zeros decode", "products"):
            yield Case(GATE_UP, tokens, plan, without, coding="w4a8")


def int4_cases() -> Iterator[Case]:
    tall = Plan(workers=2, stack=2)
    for tokens in (16, 64, 128):
        for without in ("", "decode", "zeros", "products"):
            yield Case(GATE_UP, tokens, tall, without)
        yield Case(GATE_UP, tokens, tall, activation="silu")
    for plan in (Plan(workers=2, stack=2, slots=4), Plan(workers=2, stack=2, depth=64), Plan(workers=2, stack=1)):
        yield Case(GATE_UP, 64, plan)
    for shape, splits in ((DOWN, (2, 4, 7, 8)), (QKV, (1, 2, 4)), (OUT, (2, 4, 8))):
        for count, (workers, stack) in itertools.product(splits, ((2, 2), (2, 1), (1, 1))):
            if 80 <= shape[0] // (workers * stack * HOPPER_ROWS) * count <= 132:
                yield Case(shape, 64, Plan(workers=workers, stack=stack, splits=count))
    for tokens, even in itertools.product((64, 128), (False, True)):
        yield Case(GATE_UP_70B, tokens, Plan(workers=2, stack=2, even=even), activation="silu")
        yield Case(QKV_70B, tokens, Plan(workers=2, stack=1, even=even))


CASES: dict[Coding, Callable[[], Iterator[Case]]] = {"int4": int4_cases, "w4a8": w4a8_cases}


def undecoded(words: Array, scales: tuple[Array, ...], coding: Coding, grouping: Grouping | None, chunk: int) -> Array:
    """In place of `gpu_decode.decode`: every word four times."""
    del grouping, chunk

    @plgpu.inline_mgpu(
        arg_types=(gpu_decode.word_layout(coding), (gpu_decode.ROW_LAYOUT,) * len(scales)),
        return_type=plgpu.ShapeDtypeStruct((HOPPER_ROWS, CHUNK), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def convert(_: Any, words: Any, scales: Any) -> Any:
        del scales
        registers = [vector.extract(each, [], [i]) for each in words.registers.flat for i in range(VECTOR)]
        return gpu_decode.operand([word for word in registers for _ in range(4)])

    return convert(words, scales)  # pyright: ignore[reportCallIssue]


def unmultiplied(accumulator: Any, left: Array, right: Any) -> None:
    """In place of `wgmma`: takes the left side, so that it is there."""
    del accumulator, right

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA_8BIT if left.dtype.itemsize == 1 else plgpu.Layout.WGMMA,))
    def take(_: Any, left: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        for register in left.registers.flat:
            word = mgpu.utils.bitcast(register, i32)
            llvm.inline_asm(ir.Type.parse("!llvm.void"), [word], "", "r", has_side_effects=True)

    take(left)  # pyright: ignore[reportCallIssue]


PRODUCTS = plgpu, "wgmma", unmultiplied
REPLACED = {
    "int4": {
        "decode": (gpu_decode, "decode", undecoded),
        "zeros": (gpu_decode, "_less", lambda number, *_: number),
        "products": PRODUCTS,
    },
    "w4a8": {
        "decode": (gpu_w4a8_decode, "_halves", lambda word: (word, word)),
        "zeros": (
            gpu_w4a8_multiply,
            "_taken_away",
            lambda sums, *_: [gpu_w4a8_multiply.blank(each.shape) for each in sums],
        ),
        "products": PRODUCTS,
    },
}


@contextlib.contextmanager
def left_out(coding: Coding, without: str) -> Iterator[None]:
    replaced = [REPLACED[coding][part] for part in without.split()]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    jax.clear_caches()
    try:
        for module, name, function in replaced:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
        jax.clear_caches()


@functools.cache
def weights_of(coding: Coding, shape: tuple[int, int]) -> list[Packed]:
    return [new_weight(coding, GROUP, shape, seed) for seed in range(WEIGHTS)]


def measure(case: Case) -> dict[str, Any]:
    row = {name: value for name, value in case._asdict().items() if name != "plan"}
    plan = {name: value for name, value in vars(case.plan).items() if value != Plan.__dataclass_fields__[name].default}
    bf16 = plain_time(case.shape, case.tokens)
    weights, tokens = weights_of(case.coding, case.shape), new_x(case.shape, case.tokens)
    x = as_taken(tokens, weights[0])

    def product(x: Tokens, weight: Packed) -> Array:
        if case.tokens > gpu.MAX_TOKENS:
            return gpu.matmul(x, weight, plan=case.plan)
        return gpu.parts(x, weight, plan=case.plan, activation=case.activation)

    with left_out(case.coding, case.without) if case.without else contextlib.nullcontext():
        took = timed(product, x, weights)(x, weights)
    if not case.without and case.activation is None and case.coding == "int4":
        row["error"] = round(error(case.plan, tokens, weights[0]), 5)
    row |= plan | {"us": round(1e6 * took, 1), "of_bf16": round(took / bf16, 3)}
    if case.shape[0] == OUT[0]:
        row["with_norm_us"] = round(1e6 * timed(normed(case.plan), x, weights)(x, weights), 1)
    return row


def steady(name: str, product: Callable[[Array, Any], Array], x: Array, weights: list[Any]) -> dict[str, Any]:
    """What the driver tells while a product runs again and again."""
    run = jax.jit(lambda x, weights: [product(x, weight) for weight in weights])
    jax.block_until_ready(run(x, weights))
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", f"-lms={SAMPLE_MS}"]
    count, started = 0, time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        while time.monotonic() < started + STEADY_S:
            jax.block_until_ready([run(x, weights) for _ in range(20)][-1])
            count += 20 * len(weights)
        took = time.monotonic() - started
        driver.terminate()
        said = [line.split(",") for line in (driver.stdout or ())]
    later = np.array(said[len(said) // 2 :], float)
    clock, power = np.median(later, axis=0)
    return {"steady": name, "tokens": x.shape[0], "us": round(1e6 * took / count, 1), "mhz": clock, "watts": power}


def steady_cases(tokens: int) -> Iterator[dict[str, Any]]:
    x = new_x(GATE_UP, tokens)
    wide = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), GATE_UP, jnp.bfloat16) / 50)
    yield steady("bf16", plain_product, x, [wide(seed) for seed in range(WEIGHTS)])
    narrow = jax.jit(lambda seed: fp8_weight(seed, *GATE_UP))
    yield steady("fp8", gpu_eight_bits.parts, x, [narrow(seed) for seed in range(WEIGHTS)])
    yield steady("int4", gpu.parts, x, weights_of("int4", GATE_UP))


def error(plan: Plan, x: Array, weight: Packed) -> float:
    """The distance from the reference, in shares of its length; to round the result alone is 0.0017."""
    got = total(gpu.parts(x, weight, plan=plan))[: x.shape[0]].astype(jnp.float32)
    want = jax.jit(reference.matmul)(x.astype(jnp.float32), gpu_layout.unpack(weight))
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def normed(plan: Plan) -> Callable[[Array, Any], Any]:
    """A product of 64 tokens, and what a layer does with it next."""
    old, scale = jnp.ones((64, OUT[0]), jnp.bfloat16), jnp.ones(OUT[0], jnp.bfloat16)
    return lambda x, weight: add_norm_gpu.add_norm(old, gpu.parts(x, weight, plan=plan), scale, Rms(eps=1e-5))


def main() -> None:
    parser = argparse.ArgumentParser(description="What bounds a product with 4-bit weights on an H200.")
    parser.add_argument("--seconds", type=float, default=300, help="no case is begun after so long")
    parser.add_argument("--codings", nargs="+", choices=list(CASES), default=["int4"])
    options = parser.parse_args()
    require_gpu()
    end = time.monotonic() + options.seconds
    for tokens in (16, 64, 128) if "int4" in options.codings else ():
        for row in steady_cases(tokens):
            print(json.dumps(row), flush=True)
    for case in itertools.chain.from_iterable(CASES[coding]() for coding in options.codings):
        if time.monotonic() > end:
            print(json.dumps({"left_out": str(case)}), flush=True)
            continue
        try:
            print(json.dumps(measure(case)), flush=True)
        except Exception as error:  # what a plan does not do is told, and the others are still timed
            print(json.dumps({"failed": str(case), "error": str(error)[:300]}), flush=True)


if __name__ == "__main__":
    main()
