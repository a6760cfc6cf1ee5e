"""One version: pyproject.toml has it, all else follows."""

import re
import tomllib
from pathlib import Path

import hex_llm

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_package_tells_the_version_of_pyproject():
    assert hex_llm.__version__ == VERSION


def test_the_newest_entry_of_the_changelog_is_the_version():
    entries = re.findall(
        r"^## (\S+) \((?:not released yet|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    headings = re.findall(r"^## ", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert len(entries) == len(headings)
    assert entries[0] == VERSION
    numbers = [tuple(map(int, entry.split("."))) for entry in entries]
    assert numbers == sorted(set(numbers), reverse=True)
