"""A program's main function: its log, and what it raises as one line and an exit code. Done here, nowhere else."""

import os
import sys
from collections.abc import Callable, Sequence

from hex_llm import log
from hex_llm.errors import HexError, StartError


def run_command(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int:
    """Runs `main`; returns the exit code."""
    try:
        try:
            return _exit_code(main, argv)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
        return 141  # 128 + SIGPIPE, as shells have it


def _exit_code(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int:
    try:
        log.configure()
        return main(argv) or 0
    except HexError as error:
        print(f"hex-llm: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, StartError) else 1
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as shells have it
