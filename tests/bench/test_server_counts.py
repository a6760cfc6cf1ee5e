"""What `hex-llm bench serve` reads of a server's own counts."""

import json
import logging

import pytest

from hex_llm.bench import server_counts
from hex_llm.bench.server_counts import ServerCounts
from hex_llm.bench.serving import main
from tests.bench.fake_server import FakeServer
from tests.bench.test_serving import figures

RUN = ["--num-prompts=4", "--random-input-len=4", "--random-output-len=2", "--num-warmups=2", "--save-result"]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(server_counts, "_NEWS_S", 0.0)


def metrics(number: int) -> str:
    """As our server would after so many requests, of 1000 bytes and 20 ms each, and with some from before."""
    return f"""\
# HELP hexllm:kv_transfers_total Sequences whose blocks went to another engine.
# TYPE hexllm:kv_transfers_total counter
hexllm:kv_transfers_total{{model_name="a b"}} {100 + number}.0
hexllm:kv_transfer_bytes_total{{model_name="a b"}} {1e12 + 1000 * number}
hexllm:kv_transfer_seconds_total{{model_name="a b"}} {0.5 + 0.02 * number}
hexllm:kv_transfer_exposed_seconds_total{{model_name="a b"}} {0.005 * number}
hexllm:kv_transfer_failures_total{{model_name="a b"}} 2.0
hexllm:xla_compiles_after_ready_total {number // 3}.0
hexllm:replica_up{{replica="0"}} 1.0
"""


def bench(server: FakeServer, folder) -> dict:
    assert main(["--base-url", server.url, *RUN, "--result-dir", str(folder), "--result-filename=r.json"]) == 0
    return json.loads((folder / "r.json").read_text())


def test_what_was_transferred_during_the_run_is_reported_and_what_was_before_is_not(tmp_path, capsys):
    with FakeServer(metrics=metrics, prefill_s=0.01) as server:
        result = bench(server, tmp_path)
    found = figures(capsys.readouterr().out)
    assert found["KV transfers:"] == "4"
    assert found["Failed KV transfers:"] == "0"
    assert found["Total KV bytes:"] == "4000"
    assert found["KV transfer rate (MB/s):"] == "0.05"
    assert found["Mean KV transfer (ms):"] == "20.00"
    assert found["Mean KV transfer, not hidden (ms):"] == "5.00"
    assert found["XLA compiles while serving:"] == "2"
    share = float(found["Mean KV transfer, of mean TTFT (%):"])
    assert share == pytest.approx(100 * 20 / result["mean_ttft_ms"], abs=0.01)
    assert (result["kv_transfers"], result["total_kv_bytes"]) == (4, 4000)
    assert result["mean_kv_transfer_share_of_ttft"] == pytest.approx(share / 100, abs=1e-4)


@pytest.mark.parametrize(
    "text",
    [None, lambda number: "vllm:num_requests_running 1.0\n", lambda number: "\xff<html>"],
    ids=["none", "vllm", "html"],
)
def test_of_a_server_that_does_not_count_this_nothing_is_said(text, tmp_path, capsys, caplog):
    with FakeServer(metrics=text) as server:
        result = bench(server, tmp_path)
    assert not any(word in capsys.readouterr().out for word in ("KV", "XLA"))
    assert not any("kv" in name or "xla" in name for name in result)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_plain_server_of_ours_has_transferred_nothing(tmp_path, capsys):
    with FakeServer(metrics=lambda number: "hexllm:xla_compiles_after_ready_total 7.0\n") as server:
        result = bench(server, tmp_path)
    assert not any(word in capsys.readouterr().out for word in ("KV", "XLA"))
    assert (result["kv_transfers"], result["xla_compiles_while_serving"]) == (0, 0)


def test_samples_of_a_name_are_added_up():
    text = 'hexllm:kv_transfers_total{model_name="a"} 1.0\nhexllm:kv_transfers_total{model_name="b"} 2e3\n'
    assert ServerCounts.parse(text) == ServerCounts(2001.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert ServerCounts.parse("") is None
    assert ServerCounts.parse("hexllm:kv_transfers_total e\nhexllm:kv_transfers_total NaN\n") is None
