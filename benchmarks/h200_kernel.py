"""Part `kernel`: attention of decode steps by itself, against the rate of a copy."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.h200_clock import seconds
from benchmarks.h200_part import Results, Settings, run_part
from benchmarks.h200_settings import COPY_TBPS
from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention import api

_CACHES = 8  # read one after the other, so that nothing is found in the L2 cache


def measure(settings: Settings, results: Results) -> None:
    sizes = settings.plan.sizes
    results.command([sys.executable, "-m", "benchmarks.h200", "--only=kernel"])
    results.detail("device", f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    with results.case("copy"):
        results.figure("copy", _copy_rate(sizes.kernel_copy_mib, sizes.kernel_repeats))
    random = np.random.default_rng(0)
    for name, (count, low, high) in sizes.kernel_contexts.items():
        with results.case(name):
            lengths = random.integers(low, high, count, endpoint=True)
            microseconds, rate = _decode_rate(settings, lengths)
            results.detail(f"{name} us, TB/s", [round(microseconds, 2), round(rate, 3)])
            results.figure(f"kernel_{name}", rate / COPY_TBPS)


def _copy_rate(mib: int, repeats: int) -> float:
    """TB/s, what is read and what is written counted."""
    source = jnp.zeros(mib * 2**20 // 4, jnp.int32)
    copy = jax.jit(lambda x: x + 1)  # reads and writes like a copy, and cannot be left out
    return 2 * source.nbytes / seconds(copy, source, repeats=repeats) / 1e12


def _decode_rate(settings: Settings, lengths: np.ndarray) -> tuple[float, float]:
    """Microseconds of one layer, and TB/s of keys and values read."""
    shape, page = settings.plan.shape, settings.plan.sizes.kernel_page
    heads, kv_heads, width = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    table, num_pages = page_table(np.random.default_rng(1), lengths, page)
    cache = (num_pages, 2, kv_heads, page, width)
    new_cache = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), cache, jnp.bfloat16))
    caches = tuple(new_cache(seed) for seed in range(_CACHES))
    q = jax.random.normal(jax.random.key(99), (len(lengths), heads, width), jnp.bfloat16)
    prepared, attend = _decoder(jnp.asarray(lengths, jnp.int32), jnp.asarray(table), kv_heads, width)

    @jax.jit
    def layers(q: Array, caches: tuple[Array, ...], prepared: Any) -> Array:
        for pages in caches:
            q = attend(q, pages, prepared)
        return q

    time = seconds(layers, q, caches, prepared, repeats=settings.plan.sizes.kernel_repeats) / _CACHES
    return 1e6 * time, 2 * 2 * kv_heads * width * int(lengths.sum()) / time / 1e12


def _decoder(
    kv_len: Array, table: Array, kv_heads: int, width: int
) -> tuple[Any, Callable[[Array, Array, Any], Array]]:
    """What is made once per step, and the attention of a layer that uses it."""
    scale = width**-0.5
    if jax.default_backend() == "gpu":
        from hex_llm.kernels.paged_attention.gpu_decode import decode, plan_decode

        plan = jax.jit(lambda lengths: plan_decode(lengths, num_kv_heads=kv_heads))(kv_len)
        return (table, plan), lambda q, pages, made: decode(q, pages, made[0], made[1], scale=scale)
    batch = _decode_batch(kv_len, table)

    def attend(q: Array, pages: Array, made: Batch) -> Array:
        new = jnp.zeros((q.shape[0], kv_heads, width), q.dtype)
        return api.paged_attention(q, new, new, pages, made, scale=scale)[0]

    return batch, attend


def _decode_batch(kv_len: Array, table: Array) -> Batch:
    nowhere = jnp.zeros_like(kv_len)  # page 0 takes what the tokens of the step would write
    return Batch(
        tokens=nowhere,
        positions=kv_len - 1,
        write_page=nowhere,
        write_offset=nowhere,
        cu_q=None,
        kv_len=kv_len,
        page_table=table,
        num_decode=jnp.int32(kv_len.shape[0]),
        num_seqs=jnp.int32(kv_len.shape[0]),
    )


def page_table(random: np.random.Generator, lengths: np.ndarray, page: int) -> tuple[np.ndarray, int]:
    """Pages in random order, and how many there are; page 0 is nobody's."""
    counts = -(-lengths // page)
    table = np.zeros((len(lengths), counts.max()), np.int32)
    table[np.arange(counts.max()) < counts[:, None]] = 1 + random.permutation(counts.sum())
    return table, int(counts.sum()) + 1


if __name__ == "__main__":
    run_part(measure)
