"""The plots of docs/performance.md show the figures of its tables, and are those that the script draws."""

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots

PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
PLOTS = plots.plots()


@pytest.mark.parametrize("name", PLOTS)
def test_every_figure_of_a_plot_is_in_its_section_of_the_page(name):
    plot = PLOTS[name]
    _, _, rest = PAGE.partition(f"# {plot['section']}\n")
    section = re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    there = {Decimal(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", section)}
    figures = list(_figures([plot.get("panels"), plot.get("series"), plot.get("totals")]))
    assert len(figures) >= 5
    assert [figure for figure in figures if figure not in there] == []


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_as_the_script_draws_it(name):
    assert (plots.FOLDER / f"{name}.svg").read_text() == plots.draw(PLOTS[name]), "run: python -m benchmarks.plots"


def test_the_page_shows_every_plot():
    assert sorted(re.findall(r"\]\(plots/(.*)\.svg\)", PAGE)) == sorted(PLOTS)
    assert sorted(path.stem for path in plots.FOLDER.iterdir()) == sorted(PLOTS)


def _figures(part: Any) -> Iterator[Decimal]:
    if isinstance(part, dict | list):
        for each in part.values() if isinstance(part, dict) else part:
            yield from _figures(each)
    elif part is not None:
        yield Decimal(part)
