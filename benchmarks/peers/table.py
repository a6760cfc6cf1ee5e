"""The benchmark's table: a line per engine and variant, medians, and how they compare with transformers at its best."""

BASE = "transformers"


def print_table(report: dict) -> None:
    batches = report["workload"]["batches"]
    base = {batch: _best(report["engines"], BASE, batch) for batch in batches}
    titles = ["engine", "dtype", "runs"]
    titles += [f"batch {batch} tok/s" for batch in batches] + [f"x {BASE}, batch {batch}" for batch in batches]
    rows = [[*titles, "same start"]]
    notes = []
    for line in report["engines"]:
        if line["note"]:
            notes.append(f"{line['engine']} {line['variant']}: {line['note']}")
        if line["runs"]:
            speeds = [line["batches"][str(batch)]["decode_tokens_per_s"] for batch in batches]
            ratios = [_ratio(speed, base[batch]) for speed, batch in zip(speeds, batches, strict=True)]
            same = "-" if line["same_start"] is None else f"{line['same_start']:.0%}"
            cells = [line["engine"], line["variant"], str(line["runs"]), *(f"{speed:.1f}" for speed in speeds)]
            rows.append([*cells, *ratios, same])
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles) + 1)]
    rows.insert(1, ["-" * width for width in widths])
    print()
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    print()
    for note in notes:
        print(note)


def _best(lines: list[dict], engine: str, batch: int) -> float | None:
    speeds = [
        line["batches"][str(batch)]["decode_tokens_per_s"]
        for line in lines
        if line["engine"] == engine and line["runs"]
    ]
    return max(speeds, default=None)


def _ratio(speed: float, base: float | None) -> str:
    return "-" if base is None else f"{speed / base:.2f}"
