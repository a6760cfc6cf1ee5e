"""The printed report, to the character, and the names of the figures in JSON."""

import dataclasses

from hex_llm.bench.load import Outcome
from hex_llm.bench.metrics import Counted, Latency, Summary
from hex_llm.bench.report import details, report, result
from hex_llm.bench.server_counts import ServerCounts

# As vLLM printed it for Llama-3.3-70B on a v6e-8 with 64 requests at once.
VLLM = """\
============ Serving Benchmark Result ============
Successful requests:                     3000
Failed requests:                         0
Maximum request concurrency:             64
Benchmark duration (s):                  1202.50
Total input tokens:                      2997000
Total generated tokens:                  3000000
Request throughput (req/s):              2.49
Output token throughput (tok/s):         2494.80
Peak output token throughput (tok/s):    2872.00
Peak concurrent requests:                77.00
Total Token throughput (tok/s):          4987.10
---------------Time to First Token----------------
Mean TTFT (ms):                          251.04
Median TTFT (ms):                        198.81
P99 TTFT (ms):                           2501.65
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          25.35
Median TPOT (ms):                        25.40
P99 TPOT (ms):                           25.43
---------------Inter-token Latency----------------
Mean ITL (ms):                           25.35
Median ITL (ms):                         23.11
P99 ITL (ms):                            40.75
=================================================="""

SUMMARY = Summary(
    completed=3000,
    failed=0,
    duration_s=1202.502,
    input_tokens=2997000,
    output_tokens=3000000,
    goodput=None,
    peak_output_throughput=2872.0,
    peak_concurrency=77,
    latencies={
        "ttft": Latency(mean=251.04, median=198.81, std=1.0, percentiles={99.0: 2501.65}),
        "tpot": Latency(mean=25.35, median=25.40, std=2.0, percentiles={99.0: 25.43}),
        "itl": Latency(mean=25.35, median=23.11, std=3.0, percentiles={99.0: 40.75}),
        "e2el": Latency(mean=9.0, median=8.0, std=4.0, percentiles={50.0: 8.0, 99.9: 10.0}),
    },
)


def test_the_report_is_vllms_to_the_character():
    text = report(SUMMARY, max_concurrency=64, request_rate=float("inf"), latencies=("ttft", "tpot", "itl"))
    assert text == VLLM


def test_lines_that_depend_on_flags_are_there_when_they_apply():
    summary = dataclasses.replace(SUMMARY, goodput=1.5)
    lines = report(summary, max_concurrency=None, request_rate=4, latencies=("e2el",)).splitlines()
    assert lines[3] == "Request rate configured (RPS):           4.00"
    assert lines[8] == "Request goodput (req/s):                 1.50"
    assert not any(line.startswith("Maximum request concurrency") for line in lines)
    assert lines[-6:] == [
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          9.00",
        "Median E2EL (ms):                        8.00",
        "P50 E2EL (ms):                           8.00",
        "P99.9 E2EL (ms):                         10.00",
        "=" * 50,
    ]


def test_the_figures_have_vllms_names():
    figures = result(SUMMARY, ("ttft", "e2el"))
    assert figures == {
        "duration": 1202.502,
        "completed": 3000,
        "failed": 0,
        "total_input_tokens": 2997000,
        "total_output_tokens": 3000000,
        "request_throughput": 3000 / 1202.502,
        "request_goodput": None,
        "output_throughput": 3000000 / 1202.502,
        "total_token_throughput": 5997000 / 1202.502,
        "max_output_tokens_per_s": 2872.0,
        "max_concurrent_requests": 77,
        "mean_ttft_ms": 251.04,
        "median_ttft_ms": 198.81,
        "std_ttft_ms": 1.0,
        "p99_ttft_ms": 2501.65,
        "mean_e2el_ms": 9.0,
        "median_e2el_ms": 8.0,
        "std_e2el_ms": 4.0,
        "p50_e2el_ms": 8.0,
        "p99.9_e2el_ms": 10.0,
    }


def test_details_keep_the_order_of_the_requests():
    outcome = Outcome(start_s=5.0, latency_s=1.0, first_token_s=0.25, gaps_s=(0.5,), text="ab")
    assert details(["broke", Counted(outcome, input_tokens=3, output_tokens=2)]) == {
        "input_lens": [0, 3],
        "output_lens": [0, 2],
        "start_times": [None, 5.0],
        "ttfts": [0.0, 0.25],
        "itls": [[], [0.5]],
        "generated_texts": ["", "ab"],
        "errors": ["broke", ""],
    }


# 40 requests, of 256 MiB and 125.52 ms each.
SERVED = ServerCounts(
    transfers=40.0,
    transfer_bytes=40.0 * 2**28,
    transfer_s=40 * 0.12552,
    exposed_s=0.2,
    failed_transfers=1.0,
    late_compiles=0.0,
)


def lines_of(served: ServerCounts | None, **changes) -> list[str]:
    summary = dataclasses.replace(SUMMARY, **changes)
    return report(summary, max_concurrency=None, request_rate=float("inf"), latencies=(), served=served).splitlines()


def test_what_the_server_has_transferred_is_told_with_its_rate_and_what_it_is_of_the_first_tokens_time():
    assert lines_of(SERVED)[-9:] == [
        "----------------KV Cache Transfer-----------------",
        "KV transfers:                            40",
        "Failed KV transfers:                     1",
        "Total KV bytes:                          10737418240",
        "KV transfer rate (MB/s):                 2138.59",
        "Mean KV transfer (ms):                   125.52",
        "Mean KV transfer, of mean TTFT (%):      50.00",
        "Mean KV transfer, not hidden (ms):       5.00",
        "=" * 50,
    ]
    assert len(lines_of(SERVED)) == len(lines_of(None)) + 8


def test_without_times_to_the_first_token_nothing_is_said_of_them():
    lines = lines_of(SERVED, latencies={})
    assert not any("TTFT" in line for line in lines)
    assert "Mean KV transfer (ms):                   125.52" in lines


def test_a_server_that_transferred_nothing_adds_nothing_to_the_report():
    nothing = ServerCounts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert lines_of(nothing) == lines_of(None)


def test_steps_that_were_compiled_while_serving_are_told():
    lines = lines_of(dataclasses.replace(SERVED, late_compiles=3.0))
    assert "XLA compiles while serving:              3" in lines


def test_what_the_server_counted_is_in_the_figures():
    figures = result(SUMMARY, (), SERVED)
    assert {name: value for name, value in figures.items() if name not in result(SUMMARY, ())} == {
        "kv_transfers": 40,
        "failed_kv_transfers": 1,
        "total_kv_bytes": 40 * 2**28,
        "kv_transfer_bytes_per_s": SERVED.transfer_bytes / SERVED.transfer_s,
        "mean_kv_transfer_ms": SERVED.mean_transfer_ms,
        "mean_kv_transfer_share_of_ttft": SERVED.mean_transfer_ms / 251.04,
        "mean_kv_transfer_not_hidden_ms": 5.0,
        "xla_compiles_while_serving": 0,
    }
