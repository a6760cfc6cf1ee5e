"""`hex-llm plan`: what it prints, and what it refuses."""

import json
import subprocess
import sys
import time

import pytest

from hex_llm.cli import main
from hex_llm.config import Config, config_parser, parse_config
from hex_llm.models.registry import FAMILIES
from hex_llm.planning.model import SERVED
from hex_llm.source import EMBEDDED_MODEL
from tests.planning.plans import planned

NAME = "meta-llama/Llama-3.1-8B-Instruct"
AWQ = "Qwen/Qwen2.5-7B-Instruct-AWQ"


def test_a_plan_is_a_table_a_command_and_the_five_steps(capsys):
    assert main(["plan", NAME]) == 0
    out = capsys.readouterr().out
    for machine in ("ct5lp-hightpu-4t", "ct6e-standard-1t", "ct5p-hightpu-4t", "a3-highgpu-1g", "h200x1"):
        assert machine in out
    assert f"\n  hex-llm serve --model={NAME} --tensor_parallel_size=" in out
    assert "\n  python -m hex_llm.server.api_server \\\n" in out
    assert [f"\n{number}. " in out for number in range(1, 6)] == [True] * 5
    assert "an assumption" in out
    assert max(map(len, out.splitlines())) < 240


def test_a_card_that_was_measured_is_said_to_be(capsys):
    assert main(["plan", NAME, "--machine=h200x1"]) == 0
    assert "an assumption" not in capsys.readouterr().out


def test_json_has_a_row_for_each_accelerator(capsys):
    report = planned(capsys, NAME)
    assert [row["accelerator"] for row in report["rows"]] == ["v5e", "v6e", "v5p", "v4", "tpu7x", "h100", "h200"]
    for row in report["rows"]:
        used = row["weight_bytes_per_device"] + row["temporary_bytes_per_device"] + row["kv_cache_bytes_per_device"]
        assert used < row["device_memory_bytes"]
        assert row["kv_cache_tokens"] >= report["max_model_len"]
        assert 0 < row["tpot_s"] < row["ttft_alone_s"] < row["ttft_all_at_once_median_s"]
        Config(**row["flags"])
    best = report["rows"][report["recommended"]]
    costs = [row["cost_per_million_output_tokens"] for row in report["rows"]]
    assert best["cost_per_million_output_tokens"] == min(cost for cost in costs if cost is not None)
    assert best["command"].startswith(f"hex-llm serve --model={NAME} ")


def test_the_command_line_is_one_that_the_server_reads(capsys):
    argv = (NAME, "--quantization=fp8", "--kv_cache_dtype=fp8", "--concurrency=300", "--machine=h200x1")
    (row,) = planned(capsys, *argv)["rows"]
    config, _ = parse_config(config_parser("hex-llm serve", "", server=True), row["command"].split()[2:])
    assert (config.model, config.quantization, config.kv_cache_dtype) == (NAME, "fp8", "fp8")
    assert (config.max_decode_seqs, config.enable_chunked_prefill) == (300, True)


def test_cost_is_the_price_over_the_tokens(capsys):
    (row,) = planned(capsys, NAME, "--machine=h200x1", "--price_per_hour=3.6")["rows"]
    assert row["price_per_hour"] == 3.6
    assert row["cost_per_million_output_tokens"] == pytest.approx(1000 / row["output_tokens_per_second"])
    (row,) = planned(capsys, NAME, "--machine=h200x1")["rows"]
    assert row["cost_per_million_output_tokens"] is None
    (row,) = planned(capsys, NAME, "--machine=ct5lp-hightpu-4t")["rows"]
    assert row["price_per_hour"] == 4 * 1.2


def test_a_folder_is_read_by_its_config(capsys, tmp_path):
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = planned(capsys, str(tmp_path), "--input_len=10", "--output_len=10")
    assert report["model"] == str(tmp_path)
    assert report["context"] == config["max_position_embeddings"] == report["max_model_len"]
    quantized = config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    assert planned(capsys, str(tmp_path), "--input_len=10", "--output_len=10")["weights"] == "int4"


def test_a_folder_of_what_is_not_served_is_refused(capsys, tmp_path):
    assert set(FAMILIES) == SERVED
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    for architectures in (["BertModel"], [], None):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": architectures}))
        assert main(["plan", str(tmp_path)]) == 3
        assert "config.json: architectures is " in capsys.readouterr().err


def test_requests_that_the_cache_does_not_hold_wait(capsys):
    (row,) = planned(capsys, NAME, "--machine=ct6e-standard-1t", "--concurrency=256")["rows"]
    assert row["running_requests"] == row["kv_cache_tokens"] // 2000 < 256
    (row,) = planned(capsys, NAME, "--machine=h200x4", "--concurrency=100000", "--input_len=100", "--output_len=100")[
        "rows"
    ]
    assert row["flags"]["max_decode_seqs"] == 512
    assert row["running_requests"] == 4 * 512


def test_copies_without_a_request_answer_nothing(capsys):
    one, three, eight = (
        planned(capsys, NAME, "--machine=a3-ultragpu-8g", f"--concurrency={count}")["rows"][0] for count in (1, 3, 8)
    )
    rates = [row["output_tokens_per_second"] for row in (one, three, eight)]
    assert rates == pytest.approx([rates[0], 3 * rates[0], 8 * rates[0]])


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 2, "hex-llm plan takes one model: a model's name or folder is missing."),
        ([NAME, "other"], 2, "hex-llm plan takes one model: 'other' belongs to no flag."),
        (["meta-llama/Llama3.1-8b"], 2, "No model is called 'meta-llama/Llama3.1-8b', and no folder; did you mean"),
        (["/xyzzy/"], 2, "`hex-llm models` lists those that are known."),
        ([NAME, "--accelerator=v9"], 2, "--accelerator=v9 is not one of v5e, v6e, v5p, v4, tpu7x, h100, h200."),
        ([NAME, "--machine=n1"], 2, "--machine=n1 is not one of ct5lp-hightpu-1t, "),
        ([NAME, "--machine=h200x1", "--accelerator=v5e"], 2, "--machine=h200x1 has no v5e: leave --accelerator out."),
        (
            [NAME, "--quantization=int3"],
            2,
            "--quantization=int3 is not one of none, awq, int4, w4a8 (or",
        ),
        ([NAME, "--max_model_len=0"], 2, "--max_model_len=0 must be at least 1."),
        ([NAME, "--max_model_len=200000"], 2, "--max_model_len=200000 is more than"),
        ([NAME, "--max_model_len=1000"], 2, "are 2000 tokens, more than --max_model_len=1000."),
        ([NAME, "--hbm_utilization_factor=1.5"], 2, "--hbm_utilization_factor=1.5 must be at most 1."),
        ([NAME, "--price_per_hour=3"], 2, "--price_per_hour=3.0 needs --machine or --accelerator"),
        ([NAME, "--disagg_topo=3"], 2, "--disagg_topo=3 must be two whole numbers of at least 1, such as 3,1."),
        ([NAME, "--concurency=3"], 2, "There is no flag --concurency; did you mean --concurrency?"),
        ([NAME, "--accelerator=v5e", "--tensor_parallel_size=3"], 2, "No machine of v5e has work for all its devices"),
        ([AWQ, "--quantization=fp8"], 2, "is in int4 already; leave the flag out."),
        (["meta-llama/Llama-3.1-70B", "--machine=ct5lp-hightpu-8t"], 4, "fits on no machine of ct5lp-hightpu-8t."),
        ([str(EMBEDDED_MODEL.parent)], 3, "config.json is missing."),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(argv, code, message, capsys):
    assert main(["plan", *argv]) == code
    out, error = capsys.readouterr()
    assert not out
    assert message in error


@pytest.mark.parametrize(
    ("name", "bits", "needs_another"),
    [
        (NAME, "awq", True),
        (NAME, "int4", False),
        (NAME, "w4a8", False),
        (AWQ, "awq", False),
        (AWQ, "w4a8", False),
    ],
)
def test_a_plan_says_that_the_checkpoint_must_be_another(name, bits, needs_another, capsys):
    assert main(["plan", name, f"--quantization={bits}", "--accelerator=h200"]) == 0
    out = capsys.readouterr().out
    assert ("--model must be a checkpoint that has" in out) == needs_another
    assert (f"--quantization={bits}" in out) == (bits != "awq")


@pytest.mark.parametrize(
    ("accelerator", "bits", "says"), [("v6e", "w4a8", True), ("v6e", "int4", False), ("h200", "w4a8", False)]
)
def test_a_plan_says_that_tpus_gain_nothing_from_tokens_in_8_bits_and_weights_in_4(accelerator, bits, says, capsys):
    assert main(["plan", NAME, f"--quantization={bits}", f"--accelerator={accelerator}"]) == 0
    assert ("On TPUs w4a8 is as fast as int4" in capsys.readouterr().out) == says


def test_a_plan_knows_the_names_that_the_server_knows(capsys):
    row = planned(capsys, NAME, "--accelerator=h200", "--quantization=w4afp8")["rows"][0]
    assert row["flags"]["quantization"] == "w4a8"


def test_it_takes_less_than_a_second_and_no_jax():
    code = f"import sys; from hex_llm.cli import main; main(['plan', {NAME!r}]); sys.exit('jax' in sys.modules)"
    best = 1e9
    for _ in range(3):  # of which a busy machine may spoil some
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        best = min(best, time.monotonic() - started)
    assert best < 1
