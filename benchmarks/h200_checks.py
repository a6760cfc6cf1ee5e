"""Part `checks`: the attention kernels against reference.py, in batches of many kinds.

Each kind of cases is a process of its own, where there is a GPU: an error on it is the end of its process.
"""

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

from benchmarks.h200_kernel import page_table
from benchmarks.h200_part import Results, Settings, as_argument, run_part
from benchmarks.h200_settings import Sizes
from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention import api
from hex_llm.kernels.window import Window


@dataclass(frozen=True)
class Case:
    """A random ragged batch of one kind, with poison wherever nothing has been written."""

    mixed: bool  # prompts and pieces of prompts beside the decodes
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    page: int = 32
    window: Window | None = None
    soft_cap: float | None = None
    fp8: bool = False


_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"window": Window(100), "page": 16},
    {"soft_cap": 30.0, "width": 256, "heads": 16},
    {"width": 64, "page": 8, "heads": 24},
    {"width": 96, "heads": 8, "page": 64},
    {"fp8": True},
    {"fp8": True, "width": 256, "heads": 16},
    {"heads": 28, "kv_heads": 4, "page": 128},
    {"heads": 16, "kv_heads": 1, "page": 256, "window": Window(64)},
    {"heads": 40, "soft_cap": 5.0, "window": Window(33)},
)
_OF_A_KIND: dict[str, Callable[[Case], bool]] = {
    "decode": lambda case: not case.mixed,
    "mixed": lambda case: case.mixed and case.width == 128,
    "mixed_other_widths": lambda case: case.mixed and case.width != 128,
}
_DIFFERENCES = "differences to reference.py"
CASES = tuple(Case(mixed=mixed, **kind) for kind in _KINDS for mixed in (False, True))


def measure(settings: Settings, results: Results) -> None:
    results.command([sys.executable, "-m", "benchmarks.h200", "--only=checks"])
    count = settings.plan.sizes.kernel_checks
    kinds = [kind for kind in _OF_A_KIND if any(map(_OF_A_KIND[kind], CASES[:count]))]
    told = {kind: replace(settings, results=str(settings.folder / f"checks_{kind}.json")) for kind in kinds}
    for each in told.values():
        Path(each.results).unlink(missing_ok=True)
    if jax.default_backend() == "gpu":
        _run_beside(told, settings)
    else:
        for kind, each in told.items():
            check_kind(each, Results(Path(each.results)), kind)
    errors: dict[str, float] = {}
    for kind, each in told.items():
        with results.case(kind):
            found = json.loads(Path(each.results).read_text())
            errors |= found["details"].get(_DIFFERENCES, {})
            results.errors.extend(found["errors"])
            under_way = found["details"].get("check")
            assert under_way is None, f"the process ended in the check of {under_way}"
    results.detail(_DIFFERENCES, errors)
    if len(errors) == count:
        results.figure("kernel_error", max(errors.values()))


def _run_beside(told: dict[str, Settings], settings: Settings) -> None:
    """All kinds at once: what takes long is to compile them."""
    command = [sys.executable, "-m", "benchmarks.h200_checks"]
    processes = [
        # Another part may have most of the memory.
        subprocess.Popen(
            [*command, as_argument(each), kind], env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        )
        for kind, each in told.items()
    ]
    for process in processes:
        try:
            process.wait(max(settings.seconds_left, 1))
        except subprocess.TimeoutExpired:
            process.kill()


def check_kind(settings: Settings, results: Results, kind: str) -> None:
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


def check(sizes: Sizes, case: Case, seed: int) -> float:
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
        from hex_llm.kernels.paged_attention.gpu_decode import refusal

        assert not refusal(q.shape, pages.shape, q.dtype, pages.dtype), "plain XLA would stand in for the kernels"
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
    table, num_pages = page_table(random, total, page)

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
    run_part(partial(check_kind, kind=sys.argv[2]) if len(sys.argv) > 2 else measure)
