"""A part of `h200.py` in its process: what it is told, and how it tells what it measured.

Whatever is recorded is on the disk at once, so that a part that is killed keeps what it had.
"""

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.h200_model import write_model
from benchmarks.h200_settings import PLANS, Plan


@dataclass(frozen=True, slots=True)
class Settings:
    """What all parts are told."""

    plan_name: str
    scratch: str  # a folder for whatever has to lie somewhere
    results: str  # the file that this part's figures go to
    deadline: float  # by time.time()
    peer_python: str  # the interpreter that has torch and transformers

    @property
    def plan(self) -> Plan:
        return PLANS[self.plan_name]

    @property
    def folder(self) -> Path:
        return Path(self.scratch)

    @property
    def cache(self) -> Path:
        """Where compiled steps are kept; a cold start begins without it."""
        return self.folder / "xla"

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.time()

    def model(self) -> Path:
        return write_model(self.folder / "model", self.plan.shape)


class Results:
    """What a part has measured so far: figures that have a row in the table, and details that have none."""

    def __init__(self, path: Path):
        self._path = path
        self.figures: dict[str, float] = {}
        self.details: dict[str, Any] = {}
        self.errors: list[str] = []
        self.commands: list[str] = []

    def figure(self, name: str, value: float) -> None:
        self.figures[name] = float(value)
        self._write(f"{name} = {value:.5g}")

    def detail(self, name: str, value: Any) -> None:
        self.details[name] = value
        self._write(f"{name}: {str(value)[:160]}")

    def command(self, words: Sequence[str]) -> None:
        self.commands.append(" ".join(map(str, words)))
        self._write(None)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """An error inside is told and kept, and the part goes on."""
        try:
            yield
        except Exception as error:
            said = " ".join(str(error).split())
            self.errors.append(f"{name}: {type(error).__name__}: {said[:600]}")
            self.details[f"{name} traceback"] = traceback.format_exc()[-3000:]
            self._write(f"failed: {self.errors[-1][:300]}")

    def _write(self, line: str | None) -> None:
        if line is not None:
            print(f"  {line}", flush=True)
        content = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(content, default=str))
        partial.replace(self._path)


def run_part(measure: Callable[[Settings, Results], None]) -> None:
    """`python -m benchmarks.h200_NAME SETTINGS`, the settings as JSON. Exits with 1 where something failed."""
    settings = Settings(**json.loads(sys.argv[1]))
    results = Results(Path(settings.results))
    with results.case("the part"):
        measure(settings, results)
    sys.stdout.flush()
    os._exit(1 if results.errors else 0)  # nothing is left to do, and libraries may take long to end


def as_argument(settings: Settings) -> str:
    return json.dumps(dataclasses.asdict(settings))
