"""`hex-llm bench plan-disagg`: which split of so many workers to take, by simulation from measured rates."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hex_llm.bench.disagg.flags import Settings, parse_settings
from hex_llm.bench.disagg.plan import Row, advice, plan, settings_of
from hex_llm.bench.disagg.rates import Rates


def main(argv: Sequence[str]) -> None:
    settings = parse_settings(argv)
    total = len(settings_of(settings.workers))
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        found = plan(settings.workers, settings.rates, settings.load, settings.targets)
        rows = list(bar.track(found, total=total, description="Simulating"))
    said = advice(rows, settings.load, settings.targets)
    if settings.json:
        settings.json.write_text(json.dumps(_report(settings, rows, said, argv), indent=2) + "\n")
    # A file or a pipe has no width to keep to.
    Console(width=None if sys.stdout.isatty() else 150).print(_table(settings, rows))
    print(_rates_in_words(settings.rates))
    print(said)


def _report(settings: Settings, rows: Sequence[Row], said: str, argv: Sequence[str]) -> dict[str, Any]:
    # Infinity is no JSON: where nothing bounds a number, it is left out.
    return _finite(
        {
            "arguments": list(argv),
            "workers": settings.workers,
            "load": asdict(settings.load),
            "targets": asdict(settings.targets),
            "rates": asdict(settings.rates),
            "settings": [{"name": str(row.setting), **asdict(row)} for row in rows],
            "advice": said,
        }
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items() if each != math.inf}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _table(settings: Settings, rows: Sequence[Row]) -> Table:
    load, targets = settings.load, settings.targets
    rate = f"{load.concurrency} at once" if load.concurrency else f"{load.rate:g} requests/s"
    bounds = f"TTFT {1000 * targets.ttft_s:g} ms, TPOT {1000 * targets.tpot_s:g} ms"
    if targets.itl_s < math.inf:
        bounds += f", ITL {1000 * targets.itl_s:g} ms"
    workers = f"{settings.workers} worker{'s' if settings.workers > 1 else ''}"
    table = Table(
        title=f"{workers}, {rate}, {load.prompt} tokens in, {load.answer} out; {bounds} for {targets.percent:g} %"
    )
    table.add_column("setting", no_wrap=True)
    for name in ("meets", "in time", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99", "hand over p50", "p99", "busy",
                 "tokens/s", "carries"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        figures = row.figures
        handover = map(_ms, figures.handover_s) if figures.handover_s else ("", "")
        table.add_row(
            str(row.setting),
            "yes" if figures.meets else "no",
            f"{figures.goodput:.1%}",
            *map(_ms, figures.ttft_s),
            *map(_ms, figures.tpot_s),
            _ms(figures.itl_s[1]),
            *handover,
            ", ".join(f"{share:.0%}" for share in figures.busy),
            f"{figures.tokens_per_s:,.0f}",
            "" if row.carries is None else f"{row.carries:.3g}",
        )
    return table


def _rates_in_words(rates: Rates) -> str:
    times, link = rates.times, rates.link
    return (
        f"Times are milliseconds. A decode step takes {_ms(times.decode_step)}, {_us(times.decode_sequence)} us for"
        f" each sequence and {_us(1000 * times.decode_context)} us for 1000 tokens of theirs; a step of prompts"
        f" {_ms(times.prefill_step)}, {_us(times.prefill_token)} us for each token ({_us(times.mixed_token)} beside"
        f" decodes) and {_us(1000 * times.prefill_context)} us for 1000 that it sees. Pages travel at"
        f" {link.bytes_per_second / 1e9:.3g} GB/s, {link.seconds(1000) * 1000:.3g} ms for 1000 tokens."
    )


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.3g}"
