"""Starts that are to fail: within this process, which takes a moment, or of a whole server."""

import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from hex_llm.cli import main
from tests.faults.crowd import crowding


@dataclass(frozen=True)
class End:
    """How a start ended, and what it said last."""

    code: int
    said: str
    seconds: float
    crowding: float  # how often longer than on an idle machine it may have taken

    def within(self, seconds: float) -> bool:
        return self.seconds < seconds * self.crowding


def refused(capsys: Any, *argv: str) -> End:
    """How `hex-llm chat`, in this process, refuses a model."""
    before, started = crowding(), time.monotonic()
    code = main(["chat", "--message", "hello", "--compilation_cache_dir=", *argv])
    seconds = time.monotonic() - started
    logging.getLogger("hex_llm").handlers = []  # which wrote to what capsys takes away with the test
    printed = capsys.readouterr()
    assert printed.out == "", "it answers"
    return End(code, _reason(printed.err), seconds, max(before, crowding()))


def server_end(*flags: str, timeout: float = 300, **environment: str) -> End:
    """How a server ends that cannot start."""
    command = [sys.executable, "-m", "hex_llm.server.api_server", *flags]
    before, started = crowding(), time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env=os.environ | environment
    )
    seconds = time.monotonic() - started
    return End(done.returncode, _reason(done.stderr), seconds, max(before, crowding()))


def _reason(printed: str) -> str:
    """What is said once, at the end."""
    assert "Traceback" not in printed
    assert printed.count("hex-llm: ") == 1, printed
    return printed[printed.index("hex-llm: ") :].rstrip()


def slowest(ends: dict[str, End]) -> str:
    """In words."""
    return f"the slowest after {max(end.seconds for end in ends.values()):.1f} s"
