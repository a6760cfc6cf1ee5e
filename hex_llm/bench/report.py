"""A run's result as the text that vLLM's users know, and as JSON with the same keys."""

from collections.abc import Collection, Sequence
from typing import Any

from hex_llm.bench.metrics import Counted, Latency, Summary
from hex_llm.bench.server_counts import ServerCounts

WIDTH = 50
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def report(
    summary: Summary,
    *,
    max_concurrency: int | None,
    request_rate: float,
    latencies: Collection[str],
    served: ServerCounts | None = None,
) -> str:
    """The result as a table of text, with those of the latencies, and what the server has counted if it tells."""
    rows: list[tuple[str, int | float]] = [
        ("Successful requests", summary.completed),
        ("Failed requests", summary.failed),
    ]
    if max_concurrency is not None:
        rows.append(("Maximum request concurrency", max_concurrency))
    if request_rate != float("inf"):
        rows.append(("Request rate configured (RPS)", float(request_rate)))
    rows += [
        ("Benchmark duration (s)", summary.duration_s),
        ("Total input tokens", summary.input_tokens),
        ("Total generated tokens", summary.output_tokens),
        ("Request throughput (req/s)", summary.request_throughput),
    ]
    if summary.goodput is not None:
        rows.append(("Request goodput (req/s)", summary.goodput))
    rows += [
        ("Output token throughput (tok/s)", summary.output_throughput),
        ("Peak output token throughput (tok/s)", summary.peak_output_throughput),
        ("Peak concurrent requests", float(summary.peak_concurrency)),
        ("Total Token throughput (tok/s)", summary.total_token_throughput),
    ]
    if served is not None and served.late_compiles:
        rows.append(("XLA compiles while serving", round(served.late_compiles)))
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *(_row(label, value) for label, value in rows)]
    for name in latencies:
        lines.append(f"{_TITLES[name]:-^{WIDTH}}")
        lines += [_row(f"{word} {name.upper()} (ms)", value) for word, value in _figures(summary.latencies[name])]
    if served is not None and (served.transfers or served.failed_transfers):
        lines.append(f"{'KV Cache Transfer':-^{WIDTH}}")
        lines += [_row(label, value) for label, value in _transfer_rows(served, summary)]
    return "\n".join([*lines, "=" * WIDTH])


def _transfer_rows(served: ServerCounts, summary: Summary) -> list[tuple[str, int | float]]:
    rows: list[tuple[str, int | float]] = [
        ("KV transfers", round(served.transfers)),
        ("Failed KV transfers", round(served.failed_transfers)),
        ("Total KV bytes", round(served.transfer_bytes)),
        ("KV transfer rate (MB/s)", served.transfer_rate / 1e6),
        ("Mean KV transfer (ms)", served.mean_transfer_ms),
        ("Mean KV transfer, not hidden (ms)", served.mean_exposed_ms),
    ]
    if (share := _share_of_ttft(served, summary)) is not None:
        rows.insert(5, ("Mean KV transfer, of mean TTFT (%)", 100 * share))
    return rows


def _share_of_ttft(served: ServerCounts, summary: Summary) -> float | None:
    """The mean transfer in mean times to the first token, where these are known."""
    ttft = summary.latencies.get("ttft")
    return served.mean_transfer_ms / ttft.mean if ttft is not None and ttft.mean else None


def result(summary: Summary, latencies: Collection[str], served: ServerCounts | None = None) -> dict[str, Any]:
    """The result by the names that vLLM gives its figures; what the server has counted, by ours."""
    figures: dict[str, Any] = {
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_token_throughput,
        "max_output_tokens_per_s": summary.peak_output_throughput,
        "max_concurrent_requests": summary.peak_concurrency,
    }
    for name in latencies:
        latency = summary.latencies[name]
        for word, value in (*_figures(latency), ("Std", latency.std)):
            figures[f"{word.lower()}_{name}_ms"] = value
    if served is not None:
        figures |= {
            "kv_transfers": round(served.transfers),
            "failed_kv_transfers": round(served.failed_transfers),
            "total_kv_bytes": round(served.transfer_bytes),
            "kv_transfer_bytes_per_s": served.transfer_rate,
            "mean_kv_transfer_ms": served.mean_transfer_ms,
            "mean_kv_transfer_share_of_ttft": _share_of_ttft(served, summary),
            "mean_kv_transfer_not_hidden_ms": served.mean_exposed_ms,
            "xla_compiles_while_serving": round(served.late_compiles),
        }
    return figures


def details(answered: Sequence[Counted | str]) -> dict[str, Any]:
    """One entry for each request, in order; a text stands for a request that failed with this error."""
    counted = [None if isinstance(each, str) else each for each in answered]
    return {
        "input_lens": [each.input_tokens if each else 0 for each in counted],
        "output_lens": [each.output_tokens if each else 0 for each in counted],
        "start_times": [each.outcome.start_s if each else None for each in counted],
        "ttfts": [each.outcome.first_token_s if each else 0.0 for each in counted],
        "itls": [list(each.outcome.gaps_s) if each else [] for each in counted],
        "generated_texts": [each.outcome.text if each else "" for each in counted],
        "errors": [each if isinstance(each, str) else "" for each in answered],
    }


def _figures(latency: Latency) -> list[tuple[str, float]]:
    named = [(f"P{percentile:g}", value) for percentile, value in latency.percentiles.items()]
    return [("Mean", latency.mean), ("Median", latency.median), *named]


def _row(label: str, value: float) -> str:
    return f"{label + ':':<40} {value if isinstance(value, int) else format(value, '.2f')}"
