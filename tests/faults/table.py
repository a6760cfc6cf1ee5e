"""Writes what `scripts/faults` has measured into the table of docs/reliability.md.

    .venv/bin/python -m tests.faults.table FIGURES

A scenario that was not run keeps the figure it has.
"""

import json
import re
import sys
from pathlib import Path

from tests.faults.scenarios import SCENARIOS

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
HEAD = "| | what is done | what must come of it | measured | command |\n|---|---|---|---|---|\n"
_TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")
NOT_RUN = "not run at full size yet"


def rows(page: str) -> dict[str, list[str]]:
    """The cells of each scenario."""
    found = _TABLE.search(page)
    assert found, f"{PAGE} has no table of scenarios"
    lines = found[0].splitlines()[2:]
    return {cells[0]: cells for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}


def table(figures: dict[str, list[str]], page: str) -> str:
    """The page with these figures in its table."""
    before = rows(page)
    lines = []
    for name, done, must, tests in SCENARIOS:
        seen = "; ".join(dict.fromkeys(figures.get(name, ()))) or (before[name][3] if name in before else NOT_RUN)
        lines.append(f"| {name} | {done} | {must} | {seen.replace('|', '/')} | `{command(tests)}` |\n")
    return _TABLE.sub(lambda _: HEAD + "".join(lines), page)


def command(tests: str) -> str:
    return f"scripts/faults {' '.join(f'tests/{each}' for each in tests.split())}"


def main(path: str) -> None:
    figures: dict[str, list[str]] = {}
    for line in Path(path).read_text().splitlines():
        entry = json.loads(line)
        figures.setdefault(entry["scenario"], []).append(entry["figure"])
    PAGE.write_text(table(figures, PAGE.read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
