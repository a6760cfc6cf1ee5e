"""`hex-llm tune`: the search on made-up servers, and one run of the real thing."""

import json
import math

import pytest

from hex_llm import cli
from hex_llm.bench.tune import command
from hex_llm.bench.tune.axes import Axis, Setting, axes_for, start
from hex_llm.bench.tune.search import Targets, Trial, is_better, search

AXES = (Axis("enable_chunked_prefill", (False, True)), Axis("max_num_batched_tokens", (128, 256, 512, 1024, 2048)))
NONE = Targets(None, None)


def run(measure, targets=NONE, trials=100, begin=None):
    found, count = [], iter(range(trials - 1))
    begin = begin or Setting().with_("enable_chunked_prefill", value=True)
    for trial, is_best in search(begin, AXES, targets, measure, lambda: next(count, None) is not None):
        found.append((trial, is_best))
    best = [trial for trial, is_best in found if is_best][-1]
    assert len({trial.setting for trial, _ in found}) == len(found), "a setting was tried twice"
    return best, [trial for trial, _ in found]


def peak_at(tokens):
    """A server that is the faster the closer its steps are to a size, and a little faster with chunks."""

    def measure(setting):
        size = setting.of("max_num_batched_tokens") or 512
        speed = 1000 / (1 + abs(math.log2(size / tokens))) + (50 if setting.of("enable_chunked_prefill") else 0)
        return Trial(setting, tokens_per_s=speed, ttft_ms=size / 2, tpot_ms=10)

    return measure


@pytest.mark.parametrize("tokens", [128, 256, 512, 1024, 2048])
def test_the_fastest_is_found_wherever_it_is(tokens):
    best, _ = run(peak_at(tokens))
    assert best.setting.of("max_num_batched_tokens") == (None if tokens == 512 else tokens)
    assert best.setting.of("enable_chunked_prefill") is True


def test_a_target_is_met_before_anything_is_fast():
    best, _ = run(peak_at(2048), Targets(ttft_ms=130, tpot_ms=None))
    assert best.setting.of("max_num_batched_tokens") == 256
    assert best.ttft_ms == 128


def test_where_none_meets_the_targets_the_closest_is_told():
    best, _ = run(peak_at(2048), Targets(ttft_ms=10, tpot_ms=None))
    assert best.setting.of("max_num_batched_tokens") == 128
    assert best.excess(Targets(10, None)) == 6.4


def test_no_run_is_begun_when_time_is_up():
    _, trials = run(peak_at(2048), trials=2)
    assert len(trials) == 2


def test_a_setting_that_cannot_start_is_told_and_left_alone():
    def measure(setting):
        size = setting.of("max_num_batched_tokens") or 512
        return Trial(setting, failed="no memory") if size > 512 else Trial(setting, float(size), 1.0, 1.0)

    best, trials = run(measure)
    assert best.failed is None
    assert any(trial.failed for trial in trials)


def test_noise_is_no_gain():
    one, other = (Trial(Setting(), speed, 1.0, 1.0) for speed in (100.5, 100.0))
    assert not is_better(one, other, NONE)
    assert is_better(Trial(Setting(), 102.0, 1.0, 1.0), other, NONE)


def test_flags_that_are_given_stay_as_they_are():
    axes = axes_for(16, {"enable_chunked_prefill", "hbm_utilization_factor"})
    assert [axis.flag for axis in axes] == ["max_num_batched_tokens", "max_decode_seqs"]
    assert start(16, axes).flags == ["--max_decode_seqs=16"]


def test_flags_are_known_in_every_spelling():
    given = command._given(["--max-num-seqs=8", "--no-enable-chunked-prefill", "--gpu-memory-utilization", "0.5"])
    assert given == {"max_decode_seqs", "enable_chunked_prefill", "gpu_memory_utilization"}
    assert [axis.flag for axis in axes_for(16, given)] == ["max_num_batched_tokens"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["model"], "'model' belongs to no flag; those of the server come behind --."),
        (["--percentile=100"], "--percentile=100"),
        (["--", "--max_model_len=none"], "max_model_len"),
        (["--", "--port=9000"], "--port is not for here"),
        (["--json=/nowhere/at/all.json"], "--json=/nowhere/at/all.json is in a folder that does not exist."),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_started(argv, message, capsys):
    assert cli.main(["tune", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_real_server_is_tuned(tmp_path, capsys):
    fixed = [
        "--max_model_len=256",
        "--max_decode_seqs=8",
        "--no-enable_chunked_prefill",
        "--max_num_batched_tokens=256",
    ]
    argv = ["--input_len=32", "--output_len=8", "--max_concurrency=4", "--num_prompts=4", "--budget_s=1"]
    result = tmp_path / "tuned.json"
    assert cli.main(["tune", *argv, f"--json={result}", "--", *fixed]) == 0
    out = capsys.readouterr().out
    assert "hex-llm serve --max_model_len=256" in out
    (trial,) = json.loads(result.read_text())["trials"]
    assert trial["failed"] is None
    assert trial["tokens_per_s"] > 0
    assert 0 < trial["tpot_ms"] < trial["ttft_ms"]
