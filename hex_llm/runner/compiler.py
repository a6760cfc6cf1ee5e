"""Compiling steps: ahead of time and side by side, or when first met."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hex_llm.models.arch import Arch
from hex_llm.runner.buckets import Bucket
from hex_llm.runner.layout import Layout, Shapes
from hex_llm.runner.state import State, admit, empty_state, packed_admission_size
from hex_llm.runner.step import step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arguments:
    """Shapes of a step's arrays, as far as all buckets share them."""

    params: Any
    kv: tuple[jax.ShapeDtypeStruct, ...]
    state: State

    @classmethod
    def of(cls, params: Any, arch: Arch, shapes: Shapes, dtype: Any) -> "Arguments":
        page = (shapes.num_pages, 2, arch.num_kv_heads, shapes.page_size, arch.head_dim)
        kv = tuple(jax.ShapeDtypeStruct(page, dtype) for _ in range(arch.num_layers))
        return cls(params, kv, jax.eval_shape(partial(empty_state, shapes)))


class Compiler:
    """Gives the function that runs a bucket, compiled; or as it is, where `jit` is off.

    `report` is told the share done of a compilation, or of a warm-up: 0 before something has to wait for it, 1 after.
    """

    def __init__(
        self,
        arch: Arch,
        shapes: Shapes,
        arguments: Arguments,
        *,
        jit: bool = True,
        report: Callable[[float], None] = lambda share: None,
    ):
        self.arch = arch
        self.shapes = shapes
        self.arguments = arguments
        self._jit = jit
        self._report = report
        self._lowering = threading.Lock()
        self._steps: dict[Bucket, Callable] = {}
        self._admit: Callable | None = None
        self._warm = False

    def step(self, bucket: Bucket) -> Callable:
        if bucket not in self._steps:
            if self._warm:
                logger.warning("Compiling %s, which the warm-up did not foresee; requests wait for it.", bucket)
            self._steps[bucket] = (
                self._reported(partial(self._compile, bucket)) if self._jit else _uncompiled(self._function(bucket))
            )
        return self._steps[bucket]

    def admit(self) -> Callable:
        function = self._admit or (self._reported(self._compile_admit) if self._jit else _uncompiled(admit))
        self._admit = function
        return function

    def lower(self, bucket: Bucket) -> Any:
        function = jax.jit(self._function(bucket), donate_argnums=(1, 2))
        blob = jax.ShapeDtypeStruct((Layout(bucket, self.shapes).size,), jnp.int32)
        return function.lower(self.arguments.params, self.arguments.kv, self.arguments.state, blob)

    def temporaries(self, bucket: Bucket) -> int:
        """Bytes that a step takes beside its arguments and results."""
        compiled = self._compile(bucket)
        self._steps[bucket] = compiled
        return compiled.memory_analysis().temp_size_in_bytes

    @contextmanager
    def warm_up(self, buckets: Iterable[Bucket]) -> Iterator[None]:
        """Compiles buckets while the body runs, and waits for the rest with a progress bar; none if the body fails."""
        started = time.monotonic()
        pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile")
        try:
            known = len(self._steps)
            steps = {b: pool.submit(self._compile, b) for b in buckets if b not in self._steps}
            admission = pool.submit(self._compile_admit)
            yield
            columns = (TextColumn("Compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            bar = Progress(*columns, transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty())
            total = known + len(steps) + 1
            self._report(known / total)
            with bar:
                for bucket, future in bar.track(steps.items(), total=len(steps)):
                    self._steps[bucket] = future.result()
                    self._report(len(self._steps) / total)
            self._admit = admission.result()
            self._report(1.0)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self._warm = True
        logger.info(
            "Compiled %d steps in %.1f s, beside the %d that memory was planned with.",
            len(steps),
            time.monotonic() - started,
            known,
        )

    def _reported(self, make: Callable[[], Any]) -> Any:
        self._report(0.0)
        try:
            return make()
        finally:
            self._report(1.0)

    def _compile(self, bucket: Bucket) -> Any:
        with self._lowering:  # it is all Python: side by side, each would only come later to what is not
            lowered = self.lower(bucket)
        return lowered.compile()

    def _compile_admit(self) -> Any:
        with self._lowering:
            lowered = self._lower_admit()
        return lowered.compile()

    def _function(self, bucket: Bucket) -> Callable:
        return partial(step, arch=self.arch, layout=Layout(bucket, self.shapes))

    def _lower_admit(self) -> Any:
        packed = jax.ShapeDtypeStruct((packed_admission_size(self.shapes),), jnp.int32)
        return jax.jit(admit, donate_argnums=0).lower(self.arguments.state, packed)


def _uncompiled(function: Callable) -> Callable:
    def run(*arguments: Any) -> Any:
        with jax.disable_jit():
            return function(*arguments)

    return run
