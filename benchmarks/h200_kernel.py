"""Part `kernel`: attention of decode steps by itself, against the rate of a copy, and against reference.py."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.h200_clock import seconds
from benchmarks.h200_part import Results, Settings, as_argument, run_part
from benchmarks.h200_settings import COPY_TBPS, Sizes
from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention import api

_CACHES = 8  # read one after the other, so that nothing is found in the L2 cache


@dataclass(frozen=True)
class Case:
    """A random ragged batch of one kind, with poison wherever nothing has been written."""

    mixed: bool  # prompts and pieces of prompts beside the decodes
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    page: int = 32
    window: int | None = None
    soft_cap: float | None = None
    fp8: bool = False


_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 100, "page": 16},
    {"soft_cap": 30.0, "width": 256, "heads": 16},
    {"width": 64, "page": 8, "heads": 24},
    {"width": 96, "heads": 8, "page": 64},
    {"fp8": True},
    {"heads": 28, "kv_heads": 4, "page": 128},
    {"heads": 16, "kv_heads": 1, "page": 256, "window": 64},
    {"heads": 40, "soft_cap": 5.0, "window": 33},
)
_OF_A_KIND: dict[str, Callable[[Case], bool]] = {
    "decode": lambda case: not case.mixed,
    "mixed": lambda case: case.mixed and case.width == 128,
    "mixed_other_widths": lambda case: case.mixed and case.width != 128,
}
_DIFFERENCES = "differences to reference.py"
CASES = tuple(Case(mixed=mixed, **kind) for kind in _KINDS for mixed in (False, True))


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
    _check_all(settings, results)


def _check_all(settings: Settings, results: Results) -> None:
    """Each kind of cases in a process of its own, where there is a GPU: an error on it is the end of its process."""
    count = settings.plan.sizes.kernel_checks
    wanted = [kind for kind in _OF_A_KIND if any(map(_OF_A_KIND[kind], CASES[:count]))]
    errors: dict[str, float] = {}
    for kind in wanted:
        told = replace(settings, results=str(settings.folder / f"kernel_{kind}.json"))
        Path(told.results).unlink(missing_ok=True)
        with results.case(f"checks, {kind}"):
            if jax.default_backend() == "gpu":
                command = [sys.executable, "-m", "benchmarks.h200_kernel", as_argument(told), kind]
                # Most of the memory is this process's already.
                environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
                subprocess.run(command, env=environment, timeout=max(settings.seconds_left, 1), check=False)
            else:
                part = Results(Path(told.results))
                _check_kind(told, part, kind)
            found = json.loads(Path(told.results).read_text())
            errors |= found["details"].get(_DIFFERENCES, {})
            results.errors.extend(found["errors"])
            under_way = found["details"].get("check")
            assert under_way is None, f"the process ended in the check of {under_way}"
    results.detail(_DIFFERENCES, errors)
    if len(errors) == count:
        results.figure("kernel_error", max(errors.values()))


def _check_kind(settings: Settings, results: Results, kind: str) -> None:
    sizes = settings.plan.sizes
    seeds = {case: seed for seed, case in enumerate(CASES[: sizes.kernel_checks]) if _OF_A_KIND[kind](case)}
    errors: dict[str, float] = {}
    with ThreadPoolExecutor(8) as pool:
        prepared = {case: pool.submit(_prepare, sizes, case, seed) for case, seed in seeds.items()}
        for case, check in prepared.items():
            with results.case(f"check of {case}"):
                run = check.result()
                results.detail("check", str(case))  # on the disk before it runs
                errors[str(case)] = run()
                results.detail(_DIFFERENCES, errors)
            results.detail("check", None)


def _copy_rate(mib: int, repeats: int) -> float:
    """TB/s, what is read and what is written counted."""
    source = jnp.zeros(mib * 2**20 // 4, jnp.int32)
    copy = jax.jit(lambda x: x + 1)  # reads and writes like a copy, and cannot be left out
    return 2 * source.nbytes / seconds(copy, source, repeats=repeats) / 1e12


def _decode_rate(settings: Settings, lengths: np.ndarray) -> tuple[float, float]:
    """Microseconds of one layer, and TB/s of keys and values read."""
    shape, page = settings.plan.shape, settings.plan.sizes.kernel_page
    heads, kv_heads, width = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    table, num_pages = _page_table(np.random.default_rng(1), lengths, page)
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


def _page_table(random: np.random.Generator, lengths: np.ndarray, page: int) -> tuple[np.ndarray, int]:
    """Pages in random order, and how many there are; page 0 is nobody's."""
    counts = -(-lengths // page)
    table = np.zeros((len(lengths), counts.max()), np.int32)
    table[np.arange(counts.max()) < counts[:, None]] = 1 + random.permutation(counts.sum())
    return table, int(counts.sum()) + 1


def _check(sizes: Sizes, case: Case, seed: int) -> float:
    """The largest difference to the reference."""
    return _prepare(sizes, case, seed)()


def _prepare(sizes: Sizes, case: Case, seed: int) -> Callable[[], float]:
    """Compiles the check of a case, which runs when it is called."""
    random = np.random.default_rng(100 + seed)
    # The reference holds a whole context for every token.
    total = random.integers(1, sizes.kernel_check_context // (5 if case.mixed else 1), 12 if case.mixed else 48)
    new = np.ones_like(total)
    if case.mixed:
        total[6:] = np.maximum(total[6:], 2)
        new[6:] = np.minimum(random.integers(2, 150, 6), total[6:])  # those of one token come first
    batch, written = _ragged_batch(random, new, total, case.page, mixed=case.mixed)

    def normal(*dims: int) -> Array:
        return jnp.asarray(random.standard_normal(dims, np.float32), jnp.bfloat16)

    tokens, groups = batch.tokens.shape[0], (case.kv_heads, case.width)
    q, k, v = normal(tokens, case.heads, case.width), normal(tokens, *groups), normal(tokens, *groups)
    pages = normal(len(written), 2, case.kv_heads, case.page, case.width)
    pages = jnp.where(jnp.asarray(written)[:, None, None, :, None], pages, jnp.nan)
    pages = pages.astype(jnp.float8_e4m3fn) if case.fp8 else pages
    if jax.default_backend() == "gpu":
        from hex_llm.kernels.paged_attention.gpu_decode import supports

        assert not supports(q.shape, pages.shape, q.dtype, pages.dtype), "plain XLA would stand in for the kernels"
    attend = partial(api.paged_attention, scale=case.width**-0.5, window=case.window, soft_cap=case.soft_cap)
    inputs = (q, k, v, pages, batch)
    with jax.default_matmul_precision("highest"):
        reference = jax.jit(partial(attend, implementation="reference")).lower(*inputs).compile()
    kernels = jax.jit(attend).lower(*inputs).compile()

    def difference() -> float:
        want, want_pages = reference(*inputs)
        got, got_pages = kernels(*inputs)
        # As bits: poison is not equal to itself.
        bits = jnp.uint8 if case.fp8 else jnp.uint16
        written_alike = jnp.array_equal(got_pages[1:].view(bits), want_pages[1:].view(bits))
        assert written_alike, "the pages are not those that the reference writes"
        largest = jnp.max(jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32)))
        assert jnp.isfinite(largest), "there are numbers in it that are none"
        return float(largest)

    return difference


def _ragged_batch(
    random: np.random.Generator, new: np.ndarray, total: np.ndarray, page: int, *, mixed: bool
) -> tuple[Batch, np.ndarray]:
    """Sequences of `total` tokens, the last `new` of which are this step's; and which places of pages are used."""
    table, num_pages = _page_table(random, total, page)

    def places(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        owner = np.repeat(np.arange(len(ends)), ends - starts)
        return owner, np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])

    owner, positions = places(np.zeros_like(total), total)
    written = np.zeros((num_pages, page), bool)
    written[table[owner, positions // page], positions % page] = True
    owner, positions = places(total - new, total)
    numbers = {
        "tokens": np.zeros_like(positions),
        "positions": positions,
        "write_page": table[owner, positions // page],
        "write_offset": positions % page,
        "kv_len": total,
        "page_table": table,
        "num_decode": np.sum(new == 1),
        "num_seqs": np.asarray(len(total)),
    }
    cu_q = jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32) if mixed else None
    arrays: dict[str, Any] = {name: jnp.asarray(each, jnp.int32) for name, each in numbers.items()}
    return Batch(cu_q=cu_q, **arrays), written


if __name__ == "__main__":
    run_part(partial(_check_kind, kind=sys.argv[2]) if len(sys.argv) > 2 else measure)
