"""For all tests: strict arithmetic, since a silent promotion of type or rank is a bug; an order; where time goes."""

import os
from collections import Counter

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Pallas' GPU simulator lets warpgroups wait for each other in threads of XLA's pool, which needs one for each.
os.environ.setdefault("PJRT_NPROC", "8")

from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

# How long an example takes says more about who else uses the machine.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# A worker takes one file after the other. These folders have the files of minutes, which come first, so that no worker
# is left alone with one at the end.
_LONGEST = ("tpu", "server", "faults", "multihost", "parity", "kernels", "runner", "quantization", "loader")

_LONG_S, _NUM_FILES = 300, 60  # of a run, and named at its end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return _LONGEST.index(folder) if folder in _LONGEST else len(_LONGEST)

    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, sched: Any) -> None:
    """A test that ended its process has failed; the scheduler by itself would give it to the next process, too."""
    for tests in sched.workqueue.values():
        if crashitem in tests:
            tests[crashitem] = True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which files took longest, for whoever wants the whole to take less."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if seconds.total() > _LONG_S:
        terminalreporter.section(f"slowest files, of {seconds.total():.0f} s")
        for file, taken in seconds.most_common(_NUM_FILES):
            terminalreporter.write_line(f"{taken:7.1f}s {file}")


@pytest.fixture(autouse=True, scope="session")
def _strict_promotion():
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
