"""A picture of throughput against latency, one point for each concurrency."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from hex_llm.bench.metrics import Summary
from hex_llm.errors import ConfigError

_AXES = {
    "ttft": "Median time to first token (ms)",
    "tpot": "Median time per output token (ms)",
    "e2el": "Median end-to-end latency (ms)",
}


def check_plot(path: Path) -> None:
    """Says before the run whether the picture could be written after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install '.[plot]' in a checkout.")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot={path} must be the name of a .png file.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot={path} is in a folder that does not exist.")


def write_plot(path: Path, title: str, points: Sequence[tuple[int | None, Summary]]) -> None:
    """A panel for each latency that was measured; points carry their concurrency."""
    from matplotlib.figure import Figure  # takes a second, and is an extra

    names = [name for name in _AXES if name in points[0][1].latencies]
    figure = Figure(figsize=(6 * len(names), 4.5), layout="constrained")
    figure.suptitle(title)
    heights = [summary.output_throughput for _, summary in points]
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        across = [summary.latencies[name].median for _, summary in points]
        axes.plot(across, heights, marker="o")
        for (concurrency, _), x, y in zip(points, across, heights, strict=True):
            label = "no limit" if concurrency is None else str(concurrency)
            axes.annotate(label, (x, y), textcoords="offset points", xytext=(6, -10))
        axes.set_xlabel(_AXES[name])
        axes.set_ylabel("Output tokens per second")
        axes.set_xlim(0, 1.1 * max(across) or 1.0)  # with room for the last label
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
