"""Products of an 8B's layer with 16 adapters of rank 16 on an H200, beside the same without adapters: JSON lines, in
microseconds.

    python -m benchmarks.h200_lora_products [--only gate_up down] [--tokens 64]

Every weight has adapters of its own, and there are several, so that nothing is found in the L2 cache. `error` is the
distance to the reference, of its length; to round the result alone is 0.0017.
"""

import argparse
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.h200_clock import CHAIN, require_gpu, seconds
from hex_llm.kernels.activation import Activation, gated
from hex_llm.kernels.lora_matmul import gpu, reference
from hex_llm.kernels.lora_matmul.weight import Adapted, Pairs
from hex_llm.kernels.matmul import gpu as matmul_gpu
from hex_llm.kernels.matmul import reference as matmul_reference
from hex_llm.kernels.matmul.reference import total
from hex_llm.models.adapters import whose

SLOTS, RANK = 16, 16
BATCHES = (1, 16, 64, 128)


class Product(NamedTuple):
    parts: tuple[int, ...]  # rows of each
    size: int
    activation: Activation | None = None


PRODUCTS = {
    "qkv": Product((4096, 1024, 1024), 4096),
    "o": Product((4096,), 4096),
    "gate_up": Product((14336, 14336), 4096, "silu"),
    "down": Product((4096,), 14336),
}


def new_weight(product: Product, tokens: int, seed: int) -> Adapted:
    keys = iter(jax.random.split(jax.random.key(seed), 2 + len(product.parts)))

    def normal(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16) / 64

    down = normal(len(product.parts), SLOTS, RANK, product.size)
    up = tuple(normal(rows, SLOTS, RANK) for rows in product.parts)
    own = whose(jnp.arange(tokens, dtype=jnp.int32) % (SLOTS + 1), SLOTS)  # one in 17 has none
    return Adapted(normal(sum(product.parts), product.size), Pairs(down, up), own)


def with_adapters(product: Product, x: Array, weight: Adapted) -> Array:
    return gpu.parts(x, weight, activation=product.activation)


def alone(product: Product, x: Array, weight: Adapted) -> Array:
    assert isinstance(weight.weight, Array)
    return matmul_gpu.parts(x, weight.weight, activation=product.activation)


def first(product: Product, x: Array, weight: Adapted) -> Array:
    """The first of all pairs, and what is kept of it."""
    return gpu.narrowed(x, weight.pairs, weight.own)


def error(product: Product, x: Array, weight: Adapted) -> float:
    got = total(with_adapters(product, x, weight))[: x.shape[0]].astype(jnp.float32)
    assert isinstance(weight.weight, Array)
    want = matmul_reference.matmul(x, weight.weight, dtype=jnp.dtype(jnp.float32))
    want = want + reference.lora_matmul(x, weight.pairs, weight.own)
    if product.activation is not None:
        want = gated(product.activation, *jnp.split(want, 2, axis=1))
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def measure(name: str, tokens: int) -> dict[str, Any]:
    product = PRODUCTS[name]
    count = 6 if sum(product.parts) * product.size > 5e7 else 12
    make = jax.jit(new_weight, static_argnums=(0, 1))
    weights = [make(product, tokens, seed) for seed in range(count)]
    x = jax.random.normal(jax.random.key(tokens), (tokens, product.size), jnp.bfloat16)
    row: dict[str, Any] = {"product": name, "tokens": tokens, "error": round(error(product, x, weights[0]), 5)}
    for what in (alone, first, with_adapters):

        def all_of_them(x: Array, weights: list[Adapted], what: Any = what) -> list[Array]:
            return [what(product, x, weight) for weight in weights]

        run = jax.jit(all_of_them).lower(x, weights).compile(compiler_options=CHAIN)
        row[what.__name__] = round(1e6 * seconds(run, x, weights) / count, 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=list(PRODUCTS), default=list(PRODUCTS))
    parser.add_argument("--tokens", nargs="+", type=int, default=BATCHES)
    options = parser.parse_args()
    require_gpu()
    for name in options.only:
        for tokens in options.tokens:
            print(json.dumps(measure(name, tokens)), flush=True)


if __name__ == "__main__":
    main()
