"""Products with FP8 and W8A8 weights on an H200 beside XLA's in bf16, by themselves and in a chain: JSON lines, in
microseconds.

    python -m benchmarks.h200_fp8 [--only single,many,chain,w8a8] [--many 64 2048]

Every product of a run has a weight and tokens of its own, so that no weight is found in the L2 cache and tokens are
brought to 8 bits each time. `error` is the distance to the reference, of its length.
"""

import argparse
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.h200_clock import CHAIN, require_gpu, seconds
from hex_llm.kernels.activation import gated
from hex_llm.kernels.chain import MAX_TOKENS
from hex_llm.kernels.matmul import add_norm_gpu
from hex_llm.kernels.matmul import gpu as matmul_gpu
from hex_llm.kernels.matmul.reference import total
from hex_llm.kernels.quant_matmul import gpu_eight_bits, gpu_rows, plain, reference, xla_rows
from hex_llm.kernels.quant_matmul.rows import EightBits, taken_by
from hex_llm.kernels.quant_matmul.weight import Codes, Packed
from hex_llm.kernels.rms import Rms

SHAPES = {"gate_up": (28672, 4096), "qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 14336)}
FEW = (1, 16, 64, 128)
MANY = (128, 256, 512, 2048, 8192)
W8A8 = (16, 64, 128, 2048)
BF16 = jnp.dtype(jnp.bfloat16)
EPS = Rms(1e-5)

type Product = Callable[[Array, Any], Array]


def bf16_weight(seed: int, out: int, size: int) -> Array:
    return jax.random.normal(jax.random.key(seed), (out, size), BF16) / 64


def fp8_weight(seed: int, out: int, size: int) -> Packed:
    codes = jnp.clip(100 * jax.random.normal(jax.random.key(seed), (out, size), jnp.float32), -448, 448)
    scale = jax.random.uniform(jax.random.key(seed + 1), (out, 1), jnp.float32, 1e-4, 2e-4)
    return plain.pack(Codes(codes.astype(jnp.float8_e4m3fn), scale, None, None, None, "fp8"))


def w8a8_weight(seed: int, out: int, size: int) -> Packed:
    codes = jax.random.randint(jax.random.key(seed), (out, size), -128, 128, jnp.int8)
    scale = jax.random.uniform(jax.random.key(seed + 1), (out, 1), jnp.float32, 1e-4, 2e-4)
    return plain.pack(Codes(codes, scale, None, None, None, "w8a8"))


def bf16_xla(x: Array, weight: Array) -> Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=BF16)


def bf16_chain(x: Array, weight: Array) -> Array:
    return matmul_gpu.parts(x, weight)


def eight_chain(x: Array, weight: Packed) -> Array:
    return gpu_eight_bits.parts(x, weight)


def eight_xla(x: Array, weight: Packed) -> Array:
    return xla_rows.matmul(gpu_rows.quantize(x, taken_by(weight)), weight, dtype=BF16)


def eight_xla_gated(x: Array, weight: Packed) -> Array:
    """As a layer has it: with what comes next."""
    both = eight_xla(x, weight)
    size = both.shape[1] // 2
    return gated("silu", both[:, :size], both[:, size:])


def bf16_xla_gated(x: Array, weight: Array) -> Array:
    both = bf16_xla(x, weight)
    size = both.shape[1] // 2
    return gated("silu", both[:, :size], both[:, size:])


def told(**figures: Any) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps(rounded), flush=True)


def microseconds(product: Product, xs: list[Array], weights: list[Any], options: dict[str, Any]) -> float:
    def products(xs: list[Array], weights: list[Any]) -> list[Array]:
        return [product(x, weight) for x, weight in zip(xs, weights, strict=True)]

    run = jax.jit(products).lower(xs, weights).compile(compiler_options=options)
    return 1e6 * seconds(run, xs, weights, repeats=10 if len(xs) < 8 else 20) / len(xs)


def tokens(count: int, size: int, layers: int) -> list[Array]:
    return [jax.random.normal(jax.random.key(100 + seed), (count, size), BF16) for seed in range(layers)]


def xla_options(count: int) -> dict[str, Any]:
    return {"xla_gpu_enable_triton_gemm": count < 16}


def libraries(product: Product, x: Array, weight: Any, options: dict[str, Any]) -> list[str]:
    """What a compiled product calls: cuBLASLt is `__cublas$lt$matmul`, of fp8 with `$f8` behind it."""
    compiled = jax.jit(product).lower(x, weight).compile(compiler_options=options)
    return sorted(set(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text() or "")))


def error(product: Product, x: Array, weight: Packed) -> float:
    got = product(x, weight)
    got = total(got) if got.ndim == 3 else got
    # Not in one program: XLA would leave out that tokens are brought to 8 bits and back.
    values, scale = reference.quantize_rows(x, taken_by(weight))
    rows, columns = values.astype(BF16), weight.data.astype(BF16)  # without loss
    want = jax.lax.dot_general(rows, columns, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    want = want * scale * weight.scale.reshape(1, -1)
    return float(jnp.linalg.norm(got[: x.shape[0]].astype(jnp.float32) - want) / jnp.linalg.norm(want))


def made(make: Callable[..., Any], out: int, size: int, layers: int) -> list[Any]:
    one = jax.jit(functools.partial(make, out=out, size=size))
    return [one(seed) for seed in range(layers)]


def single() -> None:
    """Batches of a chain."""
    for name, (out, size) in SHAPES.items():
        layers = 8 if out * size > 5e7 else 16
        wide, narrow = made(bf16_weight, out, size, layers), made(fp8_weight, out, size, layers)
        for count in FEW if name == "gate_up" else (64,):
            xs = tokens(count, size, layers)
            times = {
                "bf16_xla": microseconds(bf16_xla, xs, wide, xla_options(count)),
                "fp8": microseconds(eight_chain, xs, narrow, CHAIN),
                "bf16": microseconds(bf16_chain, xs, wide, CHAIN),
            }
            ratio = times["fp8"] / times["bf16_xla"]
            told(what=name, tokens=count, **times, of_xla=ratio, error=error(eight_chain, xs[0], narrow[0]))


def many(counts: Sequence[int]) -> None:
    """Batches that cuBLASLt multiplies."""
    out, size = SHAPES["gate_up"]
    wide, narrow = made(bf16_weight, out, size, 3), made(fp8_weight, out, size, 3)
    for count in counts:
        xs, options = tokens(count, size, 3), xla_options(count)
        times = {
            "bf16": microseconds(bf16_xla, xs, wide, options),
            "fp8": microseconds(eight_xla, xs, narrow, options),
            "bf16_gated": microseconds(bf16_xla_gated, xs, wide, options),
            "fp8_gated": microseconds(eight_xla_gated, xs, narrow, options),
        }
        told(
            what="many",
            tokens=count,
            **times,
            rate=times["bf16"] / times["fp8"],
            libraries=libraries(eight_xla, xs[0], narrow[0], options),
            error=error(eight_xla, xs[0], narrow[0]),
        )


def w8a8() -> None:
    """Whole numbers: batches of a chain, and one that cuBLASLt multiplies."""
    for name, (out, size) in SHAPES.items():
        layers = 8 if out * size > 5e7 else 16
        wide, narrow = made(bf16_weight, out, size, layers), made(w8a8_weight, out, size, layers)
        for count in W8A8 if name == "gate_up" else (64, 2048):
            xs, options = tokens(count, size, layers), xla_options(count)
            in_chain = count <= MAX_TOKENS
            product = eight_chain if in_chain else eight_xla
            times = {
                "bf16_xla": microseconds(bf16_xla, xs, wide, options),
                "w8a8": microseconds(product, xs, narrow, CHAIN if in_chain else options),
            }
            if name == "gate_up" and not in_chain:
                times["bf16_gated"] = microseconds(bf16_xla_gated, xs, wide, options)
                times["w8a8_gated"] = microseconds(eight_xla_gated, xs, narrow, options)
            told(
                what=f"w8a8 {name}",
                tokens=count,
                **times,
                rate=times["bf16_xla"] / times["w8a8"],
                libraries=None if in_chain else libraries(product, xs[0], narrow[0], options),
                error=error(product, xs[0], narrow[0]),
            )


def chain() -> None:
    """The feed-forward halves of layers, one behind the other, in microseconds of one."""
    layers, (out, size), norm = 8, SHAPES["gate_up"], jnp.ones(4096, BF16)
    x = tokens(64, size, 1)[0]
    for name, make, how in (
        ("bf16", bf16_weight, None),
        ("fp8", fp8_weight, EightBits(None, "float8_e4m3fn")),
        ("w8a8", w8a8_weight, EightBits(None, "int8")),
    ):
        parts: Callable[..., Array] = matmul_gpu.parts if how is None else gpu_eight_bits.parts
        weights = list(zip(made(make, out, size, layers), made(make, *SHAPES["down"], layers), strict=True))

        def run(x, weights, norm, parts=parts, how=how):
            pieces = x[None]
            for gate_up, down in weights:
                x, normed = add_norm_gpu.add_norm(x, pieces, norm, EPS, eight_bits=how)
                pieces = parts(parts(normed, gate_up, activation="silu")[0], down)
            return total(pieces)

        compiled = jax.jit(run).lower(x, weights, norm).compile(compiler_options=CHAIN)
        told(what="feed-forward chain", type=name, us=1e6 * seconds(compiled, x, weights, norm) / layers)


def main() -> None:
    parts = {"single": single, "chain": chain, "many": lambda: many(options.many), "w8a8": w8a8}
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(parts), help=f"of {','.join(parts)}")
    parser.add_argument("--many", nargs="+", type=int, default=MANY, help="tokens of its batches")
    options = parser.parse_args()
    require_gpu()
    for name in options.only:
        parts[name]()


if __name__ == "__main__":
    main()
