"""Compiling programs: ahead of time and side by side, or when first met."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hex_llm.errors import OutOfMemory
from hex_llm.kernels.hopper import is_hopper
from hex_llm.runner import device_memory
from hex_llm.runner.lowering import Lowering
from hex_llm.runner.programs import Program, Programs
from hex_llm.runner.turns import turn
from hex_llm.runner.xla_options import compiler_options

logger = logging.getLogger(__name__)


# It is all Python: side by side, each would only come later to what is not. And it changes a setting of JAX's for a
# moment, which is the same for all engines of a process.
_LOWERING = threading.Lock()


class DoesNotFit(OutOfMemory):
    """What a program needs beside its arguments, or with them, is more than the device has: its compiler says so."""

    def __init__(self, said: str):
        super().__init__(f"A step is too large for the device's memory. The compiler says: {said}")


class Compiler:
    """Gives the function that runs a program, compiled; or as it is, where `jit` is off.

    `folder` keeps lowered programs, if there is one. `report` is told the share done of a compilation, or of a warm-up:
    0 before something has to wait for it, 1 after.
    """

    def __init__(
        self,
        programs: Programs,
        *,
        folder: Path | None = None,
        jit: bool = True,
        report: Callable[[float], None] = lambda share: None,
    ):
        self.programs = programs
        self._jit = jit
        self._report = report
        self._lowering = Lowering(programs, folder)
        self._ready: dict[Program, Callable] = {}
        self._warm = False
        if is_hopper():
            # Programs with our kernels that were compiled in an earlier start call into a library that this finds.
            # Nothing else would: what is neither traced nor compiled imports no kernel.
            import jax.experimental.pallas.mosaic_gpu  # noqa: F401

    def get(self, program: Program) -> Callable:
        if program not in self._ready:
            self._ready[program] = self._late(program) if self._jit else self._uncompiled(program)
        return self._ready[program]

    def memory(self, program: Program) -> tuple[int, int]:
        """Bytes that a program takes while it runs, beside its arguments and results, and those of its new results."""
        compiled = self._compile(program)
        self._ready[program] = compiled
        analysis = compiled.memory_analysis()
        return analysis.temp_size_in_bytes, analysis.output_size_in_bytes - analysis.alias_size_in_bytes

    @contextmanager
    def warm_up(self, programs: Iterable[Program]) -> Iterator[None]:
        """Compiles programs while the body runs, and waits for the rest with a progress bar; none if the body fails."""
        started = time.monotonic()
        pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile")
        try:
            known = len(self._ready)
            pending = {each: pool.submit(self._compile, each) for each in programs if each not in self._ready}
            yield
            columns = (TextColumn("Compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            bar = Progress(*columns, transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty())
            total = known + len(pending)
            self._report(known / total)
            with bar:
                for program, future in bar.track(pending.items(), total=len(pending)):
                    self._ready[program] = future.result()
                    self._report(len(self._ready) / total)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self._warm = True
        logger.info(
            "%d programs are ready after %.1f s, beside %d from planning; %d of all were traced in an earlier start.",
            len(pending),
            time.monotonic() - started,
            known,
            self._lowering.num_known,
        )

    def _late(self, program: Program) -> Any:
        if self._warm:
            logger.warning("Compiling %s, which the warm-up did not foresee; requests wait for it.", program)
        self._report(0.0)
        try:
            return self._compile(program)
        finally:
            self._report(1.0)

    def _compile(self, program: Program) -> Any:
        with _LOWERING:  # of whose setting the path tells, too
            path = self._lowering.path(program)
        # Hosts of one replica compile side by side: each keeps its own work, and on a GPU they share the measuring, in
        # which all take part at once.
        alone = jax.process_count() == 1
        with turn(path.with_suffix(".lock") if path and alone else None):
            with _LOWERING:
                lowered = self._lowering.lower(program)
            with device_memory.asking(DoesNotFit):
                device_memory.reach("device.program")
                return lowered.compile(compiler_options=compiler_options(self.programs, program))

    def _uncompiled(self, program: Program) -> Callable:
        function, device = self.programs.function(program), self.programs.mesh.local_devices[0]

        def run(*arguments: Any) -> Any:
            with jax.disable_jit(), jax.default_device(device):
                return function(*arguments)

        return run
