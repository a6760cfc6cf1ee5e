"""Products with weights in few bits on an H200, against XLA's in bfloat16 in the same run.

    python -m benchmarks.h200_quant --seconds 150 [--codings int4 int8] [--tokens 16 64]

First rows in 8 bits and every coding's decoder are proved, number by number; then each case is a JSON line:
microseconds of one product, its share of what XLA takes in bfloat16, and in some the distance from the float32 product.
Eight weights are used one after the other, so that nothing is found in the L2 cache. Up to 128 tokens, w4a8 finds them
in 8 bits, as the kernel in front leaves them; more are brought to them in its time.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.h200_clock import CHAIN, require_gpu, seconds
from hex_llm.kernels.activation import Activation
from hex_llm.kernels.matmul import add_norm_gpu
from hex_llm.kernels.matmul import reference as matmul_reference
from hex_llm.kernels.quant_matmul import gpu, gpu_layout, gpu_rows, gpu_w4a8_layout, reference
from hex_llm.kernels.quant_matmul.rows import EightBits, Tokens, taken_by
from hex_llm.kernels.quant_matmul.weight import TABLES, Codes, Coding, Packed
from hex_llm.kernels.rms import Rms

GATE_UP, DOWN, QKV, OUT = (28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)
# Or XLA leaves out a cast there and back, and with it that tokens are rounded to 8 bits.
EXACT = {"xla_allow_excess_precision": False}
WIDTHS, RUNS = (4096, 8192, 14336), 200  # of rows, and how often they are brought to 8 bits
MANY = 512  # tokens: with more, fewer weights and repeats do
GROUPS: list[tuple[Coding, int | None]] = [
    ("int8", None), ("int8", 32), ("int8", 128), ("int4", None), ("int4", 32), ("int4", 64), ("int4", 128),
    ("nf4", 64), ("fp4", 64), ("mxfp4", 32), ("w4a8", None), ("w4a8", 128), ("w4a8", 256),
]  # fmt: skip


class Case(NamedTuple):
    coding: Coding
    group: int | None  # None: one scale for each row
    shape: tuple[int, int]
    tokens: int
    activation: Activation | None = None
    is_checked: bool = False


def cases() -> Iterator[Case]:
    common: list[tuple[Coding, int | None]] = [("int4", 128), ("int8", None), ("w4a8", 128)]
    for kind in common:
        for tokens in (1, 16, 64, 128, 256, 512):
            yield Case(*kind, GATE_UP, tokens, is_checked=tokens in (64, 512))
        yield Case(*kind, GATE_UP, 64, "silu", is_checked=True)
    for shape in (DOWN, OUT, QKV):
        for kind in common:
            for tokens in (64, 128):
                yield Case(*kind, shape, tokens)
    tables: list[tuple[Coding, int | None]] = [("nf4", 64), ("mxfp4", 32)]
    for kind in tables:
        for tokens in (16, 64, 512):
            yield Case(*kind, GATE_UP, tokens)
    for kind in common:
        for tokens in (2048, 8192):
            yield Case(*kind, GATE_UP, tokens)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def random_codes(coding: Coding, group: int | None, shape: tuple[int, int], seed: int) -> Codes:
    codes, scale, zero = jax.random.split(jax.random.key(seed), 3)
    low, high = (-128, 128) if coding == "int8" else (0, 16)
    groups = (shape[0], 1 if group is None else shape[1] // group)
    values = jax.random.uniform(scale, groups, jnp.float32, 1e-3, 4e-3) / (10 if coding == "int8" else 1)
    if coding == "mxfp4":
        values = 2.0 ** jnp.floor(jnp.log2(values))
    has_zeros = group is not None and coding not in TABLES
    return Codes(
        jax.random.randint(codes, shape, low, high, jnp.int8 if coding == "int8" else jnp.uint8),
        # By this and not by a cast there and back, which XLA leaves out.
        values
        if group is None and coding != "w4a8"
        else lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7),
        jax.random.randint(zero, groups, low, high).astype(jnp.float32) if has_zeros else None,
        order=None,
        input_scale=None,
        coding=coding,
    )


def prove(coding: Coding, group: int | None) -> bool:
    """Whether the numbers that the kernel decodes are those of the codes, once rounded: it multiplies them by ones."""
    codes = random_codes(coding, group, (256, 512), 1)
    if coding == "w4a8":
        codes = replace(codes, input_scale=jnp.float32(1))
    numbers = codes.codes.astype(jnp.float32)
    if coding in TABLES:
        numbers = jnp.asarray(TABLES[coding]).astype(jnp.bfloat16).astype(jnp.float32)[codes.codes]
    if group is None:
        want = numbers * codes.scale
    else:
        zero = 0 if codes.zero is None else jnp.repeat(codes.zero, group, axis=1)
        want = (numbers - zero) * jnp.repeat(codes.scale, group, axis=1)
        want = want if coding == "w4a8" else want.astype(jnp.bfloat16)  # whose sums are multiplied by scales
    ones, packed = jnp.eye(512, dtype=jnp.bfloat16), pack(codes)
    rows = [gpu.matmul(ones[i : i + 128], packed, dtype=jnp.dtype(jnp.float32)) for i in range(0, 512, 128)]
    got = jnp.concatenate(rows).T
    return bool((got == want.astype(jnp.float32)).all())


def prove_rows(width: int) -> bool:
    """Whether rows come in the reference's 8 bits, again and again, wherever in them the largest numbers are: several
    warpgroups share one."""
    is_large = jnp.arange(width) * 8 // width == jnp.arange(64)[:, None] % 8
    x = jax.random.normal(jax.random.key(width), (64, width), jnp.bfloat16)
    x = jnp.where(is_large, 100 * x, x)
    how = EightBits(None, "float8_e4m3fn", with_sums=True)
    values, scale = jax.jit(reference.quantize_rows, compiler_options=EXACT)(x, how)
    added, weight, rms = jnp.stack([x, x]), jnp.ones(width, jnp.bfloat16), Rms(1e-5)
    _, normed = jax.jit(matmul_reference.add_norm, static_argnums=3, compiler_options=EXACT)(x, added, weight, rms)
    found = [(gpu_rows.quantize(x, how), *add_norm_gpu.add_norm(x, added, weight, rms)) for _ in range(RUNS)]
    return all(
        (rows.values == values).all()
        and (rows.scale == scale[:, 0]).all()
        and (norm == found[0][2]).all()
        and jnp.allclose(norm.astype(jnp.float32), normed.astype(jnp.float32), rtol=2**-7)
        for rows, _, norm in found
    )


def timed(call: Callable[[Any, Any], Any], x: Any, weights: list[Any]) -> Callable[[Any, list[Any]], float]:
    """Compiles a call for each of these weights, which may be shapes: what comes back tells the seconds of one."""
    options = CHAIN if x.shape[0] <= gpu.MAX_TOKENS else {}
    run = jax.jit(lambda x, weights: [call(x, weight) for weight in weights]).lower(x, weights).compile(options)
    repeats = 20 if x.shape[0] <= MANY else 5
    return lambda x, weights: seconds(run, x, weights, repeats=repeats) / len(weights)


def plain_product(x: Array, weight: Array) -> Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def num_weights(tokens: int) -> int:
    return 8 if tokens <= MANY else 2


@functools.cache
def plain_timed(shape: tuple[int, int], tokens: int) -> Callable[[Array, list[Any]], float]:
    weight, x = (jax.ShapeDtypeStruct(sizes, jnp.bfloat16) for sizes in (shape, (tokens, shape[1])))
    return timed(plain_product, x, [weight] * num_weights(tokens))


@functools.cache
def plain_time(shape: tuple[int, int], tokens: int) -> float:
    new = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) / 50)
    weights = [new(seed) for seed in range(num_weights(tokens))]
    return plain_timed(shape, tokens)(new_x(shape, tokens), weights)


def new_x(shape: tuple[int, int], tokens: int) -> Array:
    return jax.random.normal(jax.random.key(tokens), (tokens, shape[1]), jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def new_weight(coding: Coding, group: int | None, shape: tuple[int, int], seed: int) -> Packed:
    return pack(random_codes(coding, group, shape, seed))


def pack(codes: Codes) -> Packed:
    return (gpu_w4a8_layout if codes.coding == "w4a8" else gpu_layout).pack(codes)


def as_taken(x: Array, weight: Packed) -> Tokens:
    """As a layer has them for a product."""
    few = x.shape[0] <= gpu.MAX_TOKENS
    return gpu_rows.quantize(x, taken_by(weight)) if weight.coding == "w4a8" and few else x


def compiled(case: Case) -> Callable[[Any, list[Any]], float]:
    def product(x: Tokens, weight: Packed) -> Array:
        if case.tokens > gpu.MAX_TOKENS:
            return gpu.matmul(x, weight)
        return gpu.parts(x, weight, activation=case.activation)  # what adds them is the next kernel of a layer

    plain_timed(case.shape, case.tokens)
    weight = jax.eval_shape(functools.partial(new_weight, case.coding, case.group, case.shape), 0)
    x = jax.ShapeDtypeStruct((case.tokens, case.shape[1]), jnp.bfloat16)
    return timed(product, jax.eval_shape(as_taken, x, weight), [weight] * num_weights(case.tokens))


def measure(case: Case, run: Callable[[Any, list[Any]], float]) -> dict[str, Any]:
    kind = case.coding, case.group, case.shape
    weights = [new_weight(*kind, seed) for seed in range(num_weights(case.tokens))]
    x = new_x(case.shape, case.tokens)
    row: dict[str, Any] = {**case._asdict(), "bf16_us": round(1e6 * plain_time(case.shape, case.tokens), 1)}
    if row.pop("is_checked"):
        row["error"] = round(distance(x, weights[0], random_codes(*kind, 0), case.activation), 5)
    took = run(as_taken(x, weights[0]), weights)
    return row | {"us": round(1e6 * took, 1), "of_bf16": round(took / plain_time(case.shape, case.tokens), 3)}


def distance(x: Array, weight: Packed, codes: Codes, activation: Activation | None) -> float:
    got = gpu.matmul(x, weight) if activation is None else gpu.gated_matmul(x, weight, activation)
    return distance_of(got, x, codes, activation)


def distance_of(got: Array, x: Array, codes: Codes, activation: Activation | None) -> float:
    """From the reference, in shares of its length; to round the result alone is 0.0017."""
    if activation is None:
        want = jax.jit(reference.matmul, compiler_options=EXACT)(x, codes)
    else:
        want = jax.jit(reference.gated_matmul, static_argnums=2, compiler_options=EXACT)(x, codes, activation)
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def main() -> None:
    parser = argparse.ArgumentParser(description="Products with weights in few bits on an H200.")
    parser.add_argument("--seconds", type=float, default=300, help="no case is begun after so long")
    parser.add_argument("--only", type=int, help="so many cases, of the first")
    codings, batches = sorted({coding for coding, _ in GROUPS}), sorted({case.tokens for case in cases()})
    parser.add_argument("--codings", nargs="+", choices=codings, default=codings, help="that are proved and measured")
    parser.add_argument("--tokens", nargs="+", type=int, choices=batches, default=batches, help="of the cases")
    options = parser.parse_args()
    require_gpu()
    end = time.monotonic() + options.seconds
    chosen = [case for case in cases() if case.coding in options.codings and case.tokens in options.tokens]
    chosen = chosen[: options.only]
    with ThreadPoolExecutor(8) as pool:  # before anything is timed: it would share the host
        runs = list(pool.map(compiled, chosen))
    for width in WIDTHS:
        print(json.dumps({"rows_of": width, "are_exact": prove_rows(width)}), flush=True)
    for coding, group in (each for each in GROUPS if each[0] in options.codings):
        print(json.dumps({"coding": coding, "group": group, "decoder_is_exact": prove(coding, group)}), flush=True)
    for case, run in zip(chosen, runs, strict=True):
        if time.monotonic() > end:
            print(json.dumps({"left_out": case._asdict()}), flush=True)
        else:
            print(json.dumps(measure(case, run)), flush=True)


if __name__ == "__main__":
    main()
