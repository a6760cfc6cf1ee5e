"""Takes what `scripts/faults` has measured into figures.json, and writes the table of docs/reliability.md from that.

    .venv/bin/python -m tests.faults.table MEASURED FAILED

FAILED is pytest's list of tests that failed last: of a file with one of them, nothing is taken.
"""

import json
import re
import sys
from pathlib import Path

from tests.faults.scenarios import SCENARIOS

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
FIGURES = Path(__file__).with_name("figures.json")
HEAD = "| | what is done | what must come of it | measured | command |\n|---|---|---|---|---|\n"
_TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")

type Figures = dict[str, dict[str, list[str]]]  # by scenario and file of tests


def take(figures: Figures, measured: list[dict[str, str]], failed: set[str]) -> None:
    """Has new figures of a file take the place of its old ones."""
    names = {scenario.name for scenario in SCENARIOS}
    new: Figures = {}
    for entry in measured:
        assert entry["scenario"] in names, f"there is no scenario {entry['scenario']}"
        if entry["file"] not in failed:
            new.setdefault(entry["scenario"], {}).setdefault(entry["file"], []).append(entry["figure"])
    for name, files in new.items():
        figures.setdefault(name, {}).update(files)


def with_table(page: str, figures: Figures) -> str:
    lines = []
    for name, done, must, tests in SCENARIOS:
        files = figures.get(name, {})
        seen = dict.fromkeys(each for file in sorted(files) for each in files[file])
        measured = "; ".join(seen).replace("|", "/") or "not run at full size yet"
        lines.append(f"| {name} | {done} | {must} | {measured} | `{command(tests)}` |\n")
    return _TABLE.sub(lambda _: HEAD + "".join(lines), page)


def command(tests: str) -> str:
    return f"scripts/faults {' '.join(f'tests/{each}' for each in tests.split())}"


def main(measured: str, failed: str) -> None:
    entries = [json.loads(line) for line in Path(measured).read_text().splitlines()]
    tests = json.loads(Path(failed).read_text()) if Path(failed).exists() else {}
    figures: Figures = json.loads(FIGURES.read_text())
    take(figures, entries, {test.partition("::")[0] for test in tests})
    FIGURES.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
