"""How large the scenarios are, and the figures that come of them.

CI runs all scenarios, most of them small. `scripts/faults` runs them as docs/reliability.md tells of them, and writes
down there what was measured.
"""

import json
import os
from pathlib import Path

FULL = "HEX_LLM_FAULTS_FULL"  # set: the sizes of the release
FIGURES = "HEX_LLM_FAULT_FIGURES"  # a file that figures are added to


def sized[Size](small: Size, full: Size) -> Size:
    return full if os.environ.get(FULL) else small


def record(scenario: str, figure: str) -> None:
    """Keeps what was measured for a scenario of docs/reliability.md, in words: several figures of one stand together,
    in the order of the tests.
    """
    print(f"{scenario}: {figure}")
    if path := os.environ.get(FIGURES):
        with Path(path).open("a") as file:
            test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
            file.write(json.dumps({"scenario": scenario, "file": test, "figure": figure}) + "\n")
