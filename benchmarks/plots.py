"""Draws the plots of docs/performance.md from figures.json: .venv/bin/python -m benchmarks.plots

The file has each figure of a plot once, with the section of the page that has it and the run that it is of. Text and
axes take their colour from the page around them, light or dark; a drawing is the same, byte for byte, each time.
"""

import io
import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DATA = Path(__file__).parent / "figures.json"
FOLDER = Path(__file__).parents[1] / "docs" / "plots"

_WIDTH = 6.6  # inches: text stays legible where a phone shows the plot in half its size
_BRIGHT, _PLAIN = "#3d85c6", "#8e959f"
_COLOURS = (_BRIGHT, "#e08a2b", "#4fa36c", "#9a7fd1", _PLAIN)  # seen on white and on black
_INK = "#010203"  # drawn, then replaced by the page's own
_STYLE = """<style>
:root { --ink: #24292f }
@media (prefers-color-scheme: dark) { :root { --ink: #d8dee6 } }
text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif !important }
</style>
"""
_SETTINGS: Any = {
    "svg.hashsalt": "hex-llm",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}

_DASHED: dict[str, Any] = {"color": _INK, "linewidth": 0.8, "linestyle": (0, (4, 3))}

type Plot = Mapping[str, Any]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, plot in plots().items():
        (FOLDER / f"{name}.svg").write_text(draw(plot))


def plots() -> dict[str, Plot]:
    return json.loads(DATA.read_text(), parse_float=Decimal)  # 0.790 is shown as it is written


def draw(plot: Plot) -> str:
    """The plot as SVG."""
    with mpl.rc_context(_SETTINGS):
        figure = _KINDS[plot["kind"]](plot)
        figure.suptitle(plot["title"], x=0.01, ha="left", fontsize=11, fontweight="bold")
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = re.sub(r"<metadata>.*?</metadata>\n? *", "", out.getvalue(), flags=re.DOTALL).replace(_INK, "var(--ink)")
    return re.sub(r"(<svg[^>]*>\n)", lambda start: start[1] + _STYLE, svg, count=1)


def _bars(plot: Plot) -> Figure:
    """A panel for each value of what was varied, with the same rows in all."""
    labels, panels = plot["labels"], plot["panels"]
    figure = Figure((_WIDTH, 0.3 * len(labels) + (1.35 if any(panels) else 1.15)), layout="constrained")
    colours = [_BRIGHT if label in plot["highlight"] else _PLAIN for label in labels]
    places = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, values) in zip(places, panels.items(), strict=True):
        bars = axes.barh(labels, [float(value or 0) for value in values], color=colours, height=0.68)
        shown = ["not measured" if value is None else f"{value:,}" for value in values]
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel(plot["unit"])
        axes.tick_params(axis="y", length=0)
        if "whole" in plot:
            axes.bar_label(bars, shown, padding=-32, color="white", fontsize=9)
            axes.set_xlim(0, 1.02)
            axes.axvline(1, **_DASHED)
            axes.annotate(plot["whole"], (1, 0), (-4, 0), textcoords="offset points", ha="right", fontsize=9)
        else:
            axes.bar_label(bars, shown, padding=3, fontsize=9)
            axes.margins(x=0.25)
    figure.axes[0].invert_yaxis()
    return figure


def _stack(plot: Plot) -> Figure:
    """What a whole is made of, part behind part; its frame is the whole as it was measured."""
    labels, totals = plot["labels"], plot["totals"]
    figure = Figure((_WIDTH, 0.4 * len(labels) + 1.7), layout="constrained")
    axes: Axes = figure.subplots()
    reached = [0.0] * len(labels)
    for colour, (part, values) in zip(_COLOURS, plot["series"].items(), strict=True):
        lengths = [float(value) for value in values]
        axes.barh(labels, lengths, left=reached, color=colour, height=0.6, label=part)
        reached = [so_far + length for so_far, length in zip(reached, lengths, strict=True)]
    frames = axes.barh(labels, list(map(float, totals)), fill=False, edgecolor=_INK, height=0.6, label="in all")
    axes.bar_label(frames, [f"{total} {plot['unit']}" for total in totals], padding=8, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(plot["unit"])
    axes.margins(x=0.12)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _lines(plot: Plot) -> Figure:
    figure = Figure((_WIDTH, 3.0), layout="constrained")
    axes: Axes = figure.subplots()
    across = plot["labels"]
    for colour, (name, values) in zip(_COLOURS, plot["series"].items(), strict=False):
        points = [(x, float(value)) for x, value in zip(across, values, strict=True) if value is not None]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4)
        axes.annotate(name, points[-1], (7, 0), textcoords="offset points", va="center")
    axes.plot([across[0], across[-1]], [1, 1], **_DASHED)
    axes.annotate(plot["whole"], (across[0], 1), (0, 4), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_xticks(across, [str(each) for each in across])
    axes.minorticks_off()
    axes.set_xlabel(plot["x"])
    axes.set_ylabel(plot["unit"])
    axes.set_ylim(0, 1.15)
    axes.margins(x=0.14)
    return figure


_KINDS: Mapping[str, Callable[[Plot], Figure]] = {"bars": _bars, "stack": _stack, "lines": _lines}

if __name__ == "__main__":
    main()
