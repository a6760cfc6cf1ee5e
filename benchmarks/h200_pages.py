"""Attention alone over pages of each number type on an H200: JSON lines, in microseconds of a layer.

    python -m benchmarks.h200_pages [--only decode,prefill] [--types bfloat16,float8_e4m3fn,int8] [--shape tiny]

Every layer of a run has pages of its own, so that a decode finds none in the L2 cache. `error` is the largest distance
of a result to XLA's from the same pages, and `length` the largest of XLA's results. Each line is printed once it is
measured.
"""

import argparse
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.h200_clock import seconds
from benchmarks.h200_kernel import page_table
from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention import api
from hex_llm.kernels.paged_attention.pages import Pages, rounded

TYPES = ("bfloat16", "float8_e4m3fn", "int8")
HEADS, KV_HEADS, WIDTH, PAGE = 32, 8, 128, 32  # Llama 3.1 8B
DECODES = ((64, 1500), (128, 1500), (1, 1500))  # sequences and their lengths
PROMPTS = (2048, 8192)
TINY_DECODES, TINY_PROMPTS = ((2, 70),), (70,)
LAYERS = 4
SCALE = WIDTH**-0.5


def batch_of(num_seqs: int, length: int, new: int) -> tuple[Batch, int]:
    """Sequences that end with so many new tokens each, one or all, and the number of their pages."""
    lengths = np.full(num_seqs, length)
    table, num_pages = page_table(np.random.default_rng(1), lengths, PAGE)
    nowhere = jnp.zeros(num_seqs * new, jnp.int32)
    batch = Batch(
        tokens=nowhere,
        positions=jnp.tile(jnp.arange(length - new, length, dtype=jnp.int32), num_seqs),
        write_page=nowhere,
        write_offset=nowhere,
        cu_q=None if new == 1 else jnp.arange(num_seqs + 1, dtype=jnp.int32) * new,
        kv_len=jnp.asarray(lengths, jnp.int32),
        page_table=jnp.asarray(table),
        num_decode=jnp.int32(num_seqs) if new == 1 else None,
        num_seqs=jnp.int32(num_seqs),
    )
    return batch, num_pages


def measure(name: str, num_seqs: int, length: int, new: int, dtype: str, repeats: int) -> dict[str, Any]:
    batch, num_pages = batch_of(num_seqs, length, new)
    shape = (num_pages, 2, KV_HEADS, PAGE, WIDTH)
    made = jax.jit(lambda seed: rounded(jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16), dtype))
    caches = tuple(made(seed) for seed in range(LAYERS))
    q = jax.random.normal(jax.random.key(99), (num_seqs * new, HEADS, WIDTH), jnp.bfloat16)
    batch = jax.jit(lambda batch: api.prepare(batch, q, caches[0], [None]))(batch)

    def attend(q: Array, pages: Pages, batch: Batch, implementation: str | None = None) -> Array:
        return api.attend(q, pages, batch, scale=SCALE, implementation=implementation)[: q.shape[0]]

    @jax.jit
    def layers(q: Array, caches: tuple[Pages, ...], batch: Batch) -> Array:
        for pages in caches:
            q = attend(q, pages, batch)
        return q

    ours = jax.jit(attend)(q, caches[0], batch).astype(jnp.float32)
    xlas = jax.jit(functools.partial(attend, implementation="xla"))(q, caches[0], batch).astype(jnp.float32)
    time = seconds(layers, q, caches, batch, repeats=repeats) / LAYERS
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(caches[0])) * (num_pages - 1) / num_pages
    return {
        "case": f"{name} {num_seqs} x {length}",
        "pages": dtype,
        "us": round(1e6 * time, 2),
        "TB/s": round(read / time / 1e12, 3),
        "error": float(jnp.max(jnp.abs(ours - xlas))),
        "length": float(jnp.max(jnp.abs(xlas))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="decode,prefill")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--shape", choices=("full", "tiny"), default="full", help="tiny: to see on a CPU that it works")
    options = parser.parse_args()
    tiny, parts = options.shape == "tiny", options.only.split(",")
    cases: list[tuple[str, int, int, int]] = []
    if "decode" in parts:
        cases += [("decode", count, length, 1) for count, length in (TINY_DECODES if tiny else DECODES)]
    if "prefill" in parts:
        cases += [("prefill", 1, length, length) for length in (TINY_PROMPTS if tiny else PROMPTS)]
    for case in cases:
        for dtype in options.types.split(","):
            print(json.dumps(measure(*case, dtype, 1 if tiny else 20)), flush=True)


if __name__ == "__main__":
    main()
