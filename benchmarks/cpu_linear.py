"""Products on XLA's CPU backend: forms with a 16-bit weight in GB of weights a second, and weights in few bits.

    python benchmarks/cpu_linear.py

What layers/linear.py and kernels/quant_matmul/xla.py choose by. Weights take turns, so that none stays in the cache.
"""

import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.kernels.quant_matmul import plain, xla
from hex_llm.kernels.quant_matmul.weight import Codes, Coding, Packed
from hex_llm.layers.linear import linear

OUT, IN, CHAIN = 4096, 768, 24
FEW_BITS: list[tuple[Coding, int | None]] = [
    ("int8", None),
    ("int8", 128),
    ("int4", 128),
    ("nf4", 64),
    ("fp4", 64),
    ("mxfp4", 32),
    ("fp8", None),
]
SHAPES, TURNS = ((4096, 4096), (11008, 2048)), 3


def rows_first(x, w):
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def padded_to_four(x, w):
    return rows_first(jnp.pad(x, ((0, 4 - x.shape[0]), (0, 0))), w)[: x.shape[0]]


def fused_sum(x, w):
    return jnp.sum(w.astype(jnp.float32)[None] * x.astype(jnp.float32)[:, None, :], axis=2)


def rate(product, rows: int) -> float:
    weights = [jnp.ones((OUT, IN), jnp.bfloat16) + i for i in range(CHAIN)]

    @jax.jit
    def chain(x, weights):
        for weight in weights:
            x = x + (product(x, weight).sum() * 1e-9).astype(x.dtype)
        return x

    x = jnp.ones((rows, IN), jnp.bfloat16)
    seconds = []
    for _ in range(26):
        started = time.perf_counter()
        chain(x, weights).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return CHAIN * weights[0].nbytes / min(seconds[1:]) / 1e9


def packed(random: np.random.Generator, shape: tuple[int, int], coding: Coding, group: int | None) -> Packed:
    """Codes of any value, with zeros where a format of that coding has them."""
    groups = (shape[0], shape[1] // (group or shape[1]))
    match coding:
        case "int8":
            codes = random.integers(-128, 128, shape, np.int8)
        case "fp8":
            codes = random.normal(size=shape).astype(jnp.float8_e4m3fn)
        case _:
            codes = random.integers(0, 16, shape, np.uint8)
    scale = jnp.asarray(random.uniform(0.01, 0.02, groups), jnp.float32)
    zero = jnp.asarray(random.integers(0, 16, groups), jnp.float32) if coding == "int4" else None
    return jax.jit(plain.pack)(Codes(jnp.asarray(codes), scale, zero, None, None, coding))


def side_by_side(products, x) -> dict[str, list[float]]:
    """Seconds of each, measured in turns: what else the machine does is the same for all."""
    seconds = {name: [] for name in products}
    for run in range(8):
        for name, (product, weights) in products.items():
            started = time.perf_counter()
            jax.block_until_ready([product(x, weight) for weight in weights])
            if run:
                seconds[name].append((time.perf_counter() - started) / len(weights))
    return seconds


def few_bits(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    weights = {
        f"{coding}, {f'groups of {group}' if group else 'a scale a row'}": [
            packed(random, shape, coding, group) for _ in range(TURNS)
        ]
        for coding, group in FEW_BITS
    }
    wide = [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for _ in range(TURNS)]
    for dtype in (jnp.bfloat16, jnp.float32):
        product = jax.jit(partial(xla.matmul, dtype=jnp.dtype(dtype)))
        for rows in (1, 8, 64, 256):
            products = {"linear": (jax.jit(linear), [weight.astype(dtype) for weight in wide])}
            products |= {name: (product, each) for name, each in weights.items()}
            seconds = side_by_side(products, jnp.asarray(random.normal(size=(rows, shape[1])), dtype))
            base = statistics.median(seconds.pop("linear"))
            times = ", ".join(f"{name}: {statistics.median(each) / base:.2f}" for name, each in seconds.items())
            print(f"R={rows}, {dtype.__name__}: {base * 1e3:.1f} ms; {times}", flush=True)


def main() -> None:
    print(f"x [R, {IN}] times w [{OUT}, {IN}], bfloat16, GB/s")
    for rows in (1, 4, 8, 16, 32):
        forms = [rows_first] if rows > 1 else [padded_to_four]
        forms += [fused_sum] if rows <= 4 else []
        print(f"R={rows}: " + ", ".join(f"{form.__name__} {rate(form, rows):.1f}" for form in forms), flush=True)
    for shape in SHAPES:
        print(f"\nx [R, {shape[1]}] times w {list(shape)}: of the median time with w in the type of x, in few bits")
        few_bits(shape)


main()
