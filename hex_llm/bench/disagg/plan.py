"""Which setting of so many workers meets the targets: every one is tried, and so is how much more it could carry."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hex_llm.bench.disagg.load import Load
from hex_llm.bench.disagg.rates import Rates
from hex_llm.bench.disagg.simulation import Run, Setting, simulate

EDGE = 0.1  # of the requests at either end, while the workers fill and empty: they do not count
PRECISION = 1.03  # of the rate that a setting carries
FARTHEST = 256  # times more or less than the rate that was asked for


@dataclass(frozen=True, slots=True)
class Targets:
    """So many percent of the requests shall have their first token in time, and the others in time on average; and so
    many percent of the gaps between tokens, where that is asked for, be no longer.
    """

    ttft_s: float
    tpot_s: float
    itl_s: float = math.inf
    percent: float = 99.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the requests that count. Pairs are the median and the 99th percentile, in seconds."""

    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    itl_s: tuple[float, float]
    handover_s: tuple[float, float] | None  # from the first token until another worker has all of the pages
    goodput: float  # the share of requests that had both in time
    meets: bool
    busy: tuple[float, ...]  # the share of the time in which a side's workers did something
    tokens_per_s: float  # of answers
    preemptions: int


@dataclass(frozen=True, slots=True)
class Row:
    setting: Setting
    figures: Figures
    carries: float | None  # requests a second within the targets; None: not looked for


def settings_of(workers: int) -> list[Setting]:
    splits = [Setting(prefill=prefill, decode=workers - prefill) for prefill in range(1, workers)]
    return [Setting(plain=workers), Setting(plain=workers, chunked=False), *splits]


def plan(workers: int, rates: Rates, load: Load, targets: Targets) -> Iterator[Row]:
    """A row at a time, because each takes a while."""
    for setting in settings_of(workers):
        figures = figures_of(simulate(setting, rates, load), targets, edge=0.0 if load.concurrency else EDGE)
        carries = None if load.concurrency else carried(setting, rates, load, targets, meets=figures.meets)
        yield Row(setting, figures, carries)


def figures_of(run: Run, targets: Targets, *, edge: float = EDGE) -> Figures:
    skipped = int(len(run.requests) * edge)
    ordered = sorted(run.requests, key=lambda request: request.arrival_s)
    counted = ordered[skipped : len(ordered) - skipped]
    # Without edges to leave out, until the last token; else while requests came at their rate.
    begin, end = counted[0].arrival_s, (counted[-1].arrival_s if skipped else max(each.last_s for each in counted))
    ttft = np.array([each.first_s - each.arrival_s for each in counted])
    tpot = np.array([(each.last_s - each.first_s) / max(each.answer - 1, 1) for each in counted])
    handover = np.array([each.complete_s - each.first_s for each in counted])
    gaps = [gap for side in run.sides for worker in side for gap in worker.gaps if begin <= gap.end_s <= end]
    seconds, counts = np.array([gap.seconds for gap in gaps]), np.array([gap.count for gap in gaps])
    in_time = (ttft <= targets.ttft_s) & (tpot <= targets.tpot_s)
    goodput = float(in_time.mean())
    itl_in_time = float(counts[seconds <= targets.itl_s].sum()) >= targets.percent / 100 * counts.sum()
    span = max(end - begin, 1e-12)
    return Figures(
        ttft_s=_middle_and_end(ttft),
        tpot_s=_middle_and_end(tpot),
        itl_s=(_weighted(seconds, counts, 50), _weighted(seconds, counts, 99)),
        handover_s=None if np.isnan(handover).all() else _middle_and_end(handover[~np.isnan(handover)]),
        goodput=goodput,
        meets=bool(goodput >= targets.percent / 100 and itl_in_time),
        busy=tuple(
            sum(max(min(stop, end) - max(start, begin), 0.0) for worker in side for start, stop in worker.busy)
            / (span * len(side))
            for side in run.sides
        ),
        tokens_per_s=float(counts.sum() + sum(begin <= each.first_s <= end for each in run.requests)) / span,
        preemptions=sum(each.preemptions for each in run.requests),
    )


def carried(setting: Setting, rates: Rates, load: Load, targets: Targets, *, meets: bool) -> float:
    """The highest rate of such requests within the targets; 0 where there is none."""

    def suffices(rate: float) -> bool:
        return figures_of(simulate(setting, rates, replace(load, rate=rate)), targets).meets

    low = high = load.rate
    while suffices(high) if high != load.rate else meets:
        low, high = high, high * 2
        if high > load.rate * FARTHEST:
            return low
    while high == low or not suffices(low):
        if low * FARTHEST < load.rate:
            return 0.0
        high, low = low, low / 2
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if suffices(middle) else (low, middle)
    return low


def advice(rows: Sequence[Row], load: Load, targets: Targets) -> str:
    """One sentence or two: which setting to take and why, or what would have to change."""
    if load.concurrency:
        best = max(rows, key=lambda row: (row.figures.meets, row.figures.tokens_per_s))
        met = "meets the targets with" if best.figures.meets else "misses the targets, as all do, but has"
        return f"With {load.concurrency} requests at once, {best.setting} {met} the most tokens/s."
    best = _best(rows)
    carries = best.carries or 0.0
    if not carries:
        least = min(row.figures.ttft_s[0] for row in rows), min(row.figures.tpot_s[0] for row in rows)
        return (
            f"No setting meets the targets at any rate: of those tried the least median time to the first token is"
            f" {_ms(least[0])} ms, per token {_ms(least[1])} ms."
        )
    workers = best.setting.plain + best.setting.prefill + best.setting.decode
    if not best.figures.meets:
        return (
            f"No setting of {workers} workers meets the targets at {load.rate:g} requests/s: {best.setting} carries"
            f" the most, {carries:.3g}/s, so that about {math.ceil(workers * load.rate / carries)} workers would do."
        )
    plain = rows[0]
    taken = f"Take {_flag(best.setting)}: within the targets it carries {carries:.3g} requests/s"
    splits = [row for row in rows if row.setting.prefill]
    if best is plain and not splits:
        return f"{taken}."
    if best is plain:
        split = _best(splits)
        sides = " and ".join(f"{share:.0%}" for share in split.figures.busy)
        return (
            f"{taken}; the best split, {split.setting}, carries {split.carries or 0:.3g} (its sides are busy for"
            f" {sides} of the time)."
        )
    return (
        f"{taken}, plain with chunks {plain.carries or 0:.3g}; at {load.rate:g}/s the 99th percentile of the time"
        f" between tokens is {_ms(best.figures.itl_s[1])} ms for {_ms(plain.figures.itl_s[1])}."
    )


def _best(rows: Sequence[Row]) -> Row:
    """The one that carries the most; of those that carry as much as can be told, the first, which is the simplest."""
    most = max(row.carries or 0.0 for row in rows)
    return next(row for row in rows if (row.carries or 0.0) * PRECISION >= most)


def _flag(setting: Setting) -> str:
    if setting.prefill:
        return f"--disagg_topo={setting}"
    return f"--data_parallel_size={setting.plain}" + (" --enable_chunked_prefill" if setting.chunked else "")


def _middle_and_end(values: np.ndarray) -> tuple[float, float]:
    middle, end = np.percentile(values, [50, 99])
    return float(middle), float(end)


def _weighted(values: np.ndarray, counts: np.ndarray, percent: float) -> float:
    """The least value that so many percent of all are not above."""
    if not len(values):
        return 0.0
    order = np.argsort(values)
    upto = np.cumsum(counts[order])
    return float(values[order][np.searchsorted(upto, percent / 100 * upto[-1])])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"
