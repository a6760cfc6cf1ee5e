"""What outcomes amount to, by hand."""

import pytest

from hex_llm.bench.load import Outcome
from hex_llm.bench.metrics import LATENCIES, Counted, summarize


def answered(*, start=0.0, first: float | None = 0.1, gaps=(), latency=None, input_tokens=10, output_tokens=None):
    latency = (first or 0.0) + sum(gaps) if latency is None else latency
    outcome = Outcome(start_s=start, latency_s=latency, first_token_s=first, gaps_s=tuple(gaps))
    return Counted(outcome, input_tokens, len(gaps) + 1 if output_tokens is None else output_tokens)


def summary_of(*answered, failed=0, duration=2.0, goals=None, percentiles=(99.0,)):
    return summarize(
        answered,
        failed=failed,
        duration_s=duration,
        latencies=LATENCIES,
        percentiles=percentiles,
        goals_ms=goals or {},
    )


def test_latencies_are_defined_as_in_vllm():
    summary = summary_of(answered(first=0.1, gaps=(0.2, 0.4)), answered(first=0.3, gaps=()), percentiles=(50.0,))
    ttft, tpot, itl, e2el = (summary.latencies[name] for name in ("ttft", "tpot", "itl", "e2el"))
    assert (ttft.mean, ttft.std) == pytest.approx((200, 100))
    assert tpot.mean == pytest.approx(300)  # of the one with a token after the first
    assert (itl.mean, itl.percentiles[50.0]) == pytest.approx((300, 300))
    assert (e2el.mean, e2el.median) == pytest.approx((500, 500))


def test_throughputs_count_answered_requests_over_the_duration():
    summary = summary_of(answered(gaps=[0.1] * 3), answered(gaps=[0.1] * 7), failed=1, duration=4.0)
    assert (summary.completed, summary.failed) == (2, 1)
    assert (summary.input_tokens, summary.output_tokens) == (20, 12)
    assert (summary.request_throughput, summary.output_throughput) == (0.5, 3.0)
    assert summary.total_token_throughput == 8.0


def test_the_peak_is_the_second_with_the_most_tokens():
    # Tokens at 0.5, 1.5, 1.75, 2.0 after the first start, and at 1.25, 3.25.
    summary = summary_of(
        answered(start=100.0, first=0.5, gaps=(1.0, 0.25, 0.25)), answered(start=101.0, first=0.25, gaps=(2.0,))
    )
    assert summary.peak_output_throughput == 3.0


def test_a_chunk_of_several_tokens_counts_for_them_all():
    summary = summary_of(answered(first=0.5, gaps=(1.0,), output_tokens=10))
    assert summary.peak_output_throughput == 5.0


def test_requests_of_the_same_second_are_concurrent():
    summary = summary_of(
        answered(start=0.0, first=0.5, latency=0.5),
        answered(start=0.75, first=0.5, latency=0.5),  # not at the same time, but in the same second
        answered(start=1.5, first=0.1, latency=0.1),
        answered(start=3.0, first=0.1, latency=0.1),
    )
    assert summary.peak_concurrency == 2


def test_goodput_counts_requests_that_meet_every_goal():
    quick, slow_first, slow_after = (
        answered(first=0.1, gaps=(0.01,)),
        answered(first=0.6, gaps=(0.01,)),
        answered(first=0.1, gaps=(0.2,)),
    )
    assert summary_of(quick, slow_first, slow_after, goals={"ttft": 500, "tpot": 50}).goodput == 0.5
    assert summary_of(quick, slow_first, slow_after, goals={"ttft": 500}).goodput == 1.0
    assert summary_of(quick, slow_first, slow_after, goals={"e2el": 1000}).goodput == 1.5
    assert summary_of(quick).goodput is None


def test_nothing_answered_is_all_zero():
    summary = summary_of(failed=3)
    assert (summary.completed, summary.failed, summary.peak_output_throughput, summary.peak_concurrency) == (0, 3, 0, 0)
    assert summary.latencies["ttft"].percentiles[99.0] == 0
