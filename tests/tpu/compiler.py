"""The near end of a process that compiles for TPUs, with the compiler that TPUs come with. It needs no TPU."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hex_llm.bench import tpu_aot

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-tpu/bin/python"
SILENT = tpu_aot.SILENT | {"JAX_PLATFORMS": "cpu"}


class CompilerMissingError(Exception):
    """The compiler's environment is not there, or has no libtpu."""


class RefusedError(Exception):
    """The compiler does not take the program: what it says a TPU cannot do, or has too little memory for."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program, for each device."""

    seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    kernels: tuple[str, ...]  # the names of the Pallas kernels in it, in the order of the program's text
    text: str  # the program as it is after all passes


class Compiler:
    def __init__(self, folder: Path):
        if not PYTHON.exists():
            raise CompilerMissingError(".venv-tpu is missing; `scripts/setup tpu` makes it")
        self._errors = (folder / "stderr.txt").open("w")
        self._text = folder / "program.txt"
        self._process = subprocess.Popen(
            [PYTHON, "-m", "tests.tpu.compiler_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=os.environ | SILENT | {"PYTHONPATH": str(ROOT)},
        )
        if not self._answer():
            raise CompilerMissingError(f"the compiler did not start: {self._last_words()}")

    def compile(self, program: str, topology: str, **arguments: Any) -> Compiled:
        """`program` is the dotted name of a function that gets the topology's devices and the arguments, which must
        be JSON, and gives what is to be compiled: a `jax.stages.Lowered`. `topology`: "v5e:2x2", or "v5e" for one chip.
        """
        assert self._process.stdin is not None
        call = {"program": program, "topology": topology, "arguments": arguments, "text": str(self._text)}
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer is None:
            raise RuntimeError(f"the compiler died: {self._last_words()}")
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return Compiled(**answer | {"kernels": tuple(answer["kernels"])}, text=self._text.read_text())

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def _last_words(self) -> str:
        self._process.wait()
        lines = Path(self._errors.name).read_text().splitlines()
        return lines[-1] if lines else "no word"
