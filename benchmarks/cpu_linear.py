"""Forms of a product with a 16-bit weight on XLA's CPU backend, in GB of weights a second.

    python benchmarks/cpu_linear.py

What layers/linear.py chooses by. The weights of a chain of products take turns, so that none stays in the cache.
"""

import time

import jax
import jax.numpy as jnp

OUT, IN, CHAIN = 4096, 768, 24


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


def main() -> None:
    print(f"x [R, {IN}] times w [{OUT}, {IN}], bfloat16, GB/s")
    for rows in (1, 4, 8, 16, 32):
        forms = [rows_first] if rows > 1 else [padded_to_four]
        forms += [fused_sum] if rows <= 4 else []
        print(f"R={rows}: " + ", ".join(f"{form.__name__} {rate(form, rows):.1f}" for form in forms), flush=True)


main()
