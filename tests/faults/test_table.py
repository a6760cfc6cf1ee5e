"""The page tells of every scenario, and every scenario is held by tests that are there."""

from pathlib import Path

from tests.faults.scenarios import SCENARIOS
from tests.faults.table import HEAD, PAGE, command, rows, table

TESTS = Path(__file__).parents[1]


def test_the_page_has_a_row_for_every_scenario_as_it_is_held():
    told = rows(PAGE.read_text())
    assert [*told] == [scenario.name for scenario in SCENARIOS]
    for name, done, must, tests in SCENARIOS:
        assert told[name][1:3] == [done, must]
        assert told[name][4] == f"`{command(tests)}`"


def test_the_tests_of_every_scenario_measure_it():
    for name, _, _, tests in SCENARIOS:
        files = [TESTS / each for each in tests.split()]
        assert all(file.is_file() for file in files), tests
        assert any(f'"{name}"' in file.read_text() for file in files), f"nothing in {tests} records {name}"


def test_new_figures_take_the_place_of_old_ones_and_others_stay():
    page = f"above\n\n{HEAD}| F1 | old | old | once | old |\n| F2 | old | old | twice | old |\n\nbelow\n"
    changed = table({"F1": ["5 of 5", "5 of 5", "a | b"]}, page)
    told = rows(changed)
    assert [told["F1"][3], told["F2"][3], told["F3"][3]] == ["5 of 5; a / b", "twice", "not run at full size yet"]
    assert changed.startswith("above\n\n")
    assert changed.endswith("|\n\nbelow\n")
