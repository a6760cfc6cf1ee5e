"""The page tells of every scenario, and every scenario is held by tests that are there."""

import json
from pathlib import Path

import pytest

from tests.faults.scenarios import SCENARIOS
from tests.faults.table import FIGURES, PAGE, take, with_table

TESTS = Path(__file__).parents[1]


def test_the_page_has_every_scenario_with_its_figures():
    page = PAGE.read_text()
    assert page == with_table(page, json.loads(FIGURES.read_text())), "run: scripts/faults"
    assert all(f"| {scenario.name} | {scenario.done} |" in page for scenario in SCENARIOS)


def test_the_tests_of_every_scenario_measure_it():
    for name, _, _, tests in SCENARIOS:
        files = [TESTS / each for each in tests.split()]
        assert all(file.is_file() for file in files), tests
        silent = [file.name for file in files if f'"{name}"' not in file.read_text()]
        assert not silent, f"nothing in {silent} records {name}"


def test_new_figures_of_a_file_take_the_place_of_its_old_ones_unless_it_failed():
    figures = {"F1": {"a": ["old"], "b": ["old"], "c": ["old"]}}
    measured = [{"scenario": "F1", "file": file, "figure": f"new {file}"} for file in ("a", "b")]
    take(figures, measured, {"b"})
    assert figures == {"F1": {"a": ["new a"], "b": ["old"], "c": ["old"]}}
    with pytest.raises(AssertionError, match="no scenario F99"):
        take(figures, [{"scenario": "F99", "file": "a", "figure": ""}], set())
