"""Which split is taken, what its rates are made of, and how they compare with what was measured."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from hex_llm import cli
from hex_llm.bench.disagg.command import main
from hex_llm.bench.disagg.fit import Point, fit_decode, fit_prefill, offline_points
from hex_llm.bench.disagg.flags import Options, parse_settings, rates_of
from hex_llm.bench.disagg.load import Load
from hex_llm.bench.disagg.plan import Figures, Row, Targets, advice, carried, figures_of, settings_of
from hex_llm.bench.disagg.presets import PRESETS
from hex_llm.bench.disagg.rates import Bounds, Link, Times, chunked_steps, split_steps, whole_steps
from hex_llm.bench.disagg.simulation import Setting, simulate
from hex_llm.errors import ConfigError
from tests.bench.slow_worker import CHUNKED, RATES, SPLIT, WHOLE

PRESET = "--preset=h200-llama-3.1-8b"


def test_whole_prompts_hold_decodes_up_longest():
    load = Load(rate=1.0, prompt=200, answer=100, count=200)
    found = [figures_of(simulate(each, RATES, load), Targets(1, 1)).itl_s[1] for each in (SPLIT, CHUNKED, WHOLE)]
    assert found[0] < 0.5 * found[1] < 0.5 * found[2]


@pytest.mark.parametrize(
    "more",
    [
        [Setting(plain=each) for each in (1, 2, 4)],
        [Setting(plain=each, chunked=False) for each in (1, 2, 4)],
        [Setting(prefill=each, decode=2) for each in (1, 2, 3)],
        [Setting(prefill=2, decode=each) for each in (1, 2, 3)],
    ],
    ids=["plain", "whole", "prefill", "decode"],
)
def test_more_workers_are_no_worse(more):
    targets = Targets(ttft_s=1.0, tpot_s=0.04 if more[0].plain else 0.015)
    for seed in range(3):
        load = Load(rate=4.0, prompt=150, answer=60, prompt_spread=0.5, answer_spread=0.5, count=300, seed=seed)
        shares = [figures_of(simulate(each, RATES, load), targets).goodput for each in more]
        assert all(after >= before - 0.02 for before, after in pairwise(shares)), shares
        assert shares[-1] > shares[0]


def test_a_run_depends_on_its_seed_and_nothing_else():
    load = Load(rate=3.0, prompt=150, answer=30, prompt_spread=1.0, answer_spread=1.0, count=200, seed=5)
    targets = Targets(1, 1)
    one, again, other = (
        figures_of(simulate(Setting(prefill=2, decode=2), RATES, each), targets)
        for each in (load, load, replace(load, seed=6))
    )
    assert one == again != other


def test_a_rate_that_is_carried_meets_the_targets_and_more_does_not():
    load, targets = Load(rate=1.0, prompt=200, answer=50, count=300), Targets(ttft_s=1.0, tpot_s=0.05)
    for asked in (0.5, 50.0):
        found = carried(CHUNKED, RATES, replace(load, rate=asked), targets, meets=asked == 0.5)
        assert figures_of(simulate(CHUNKED, RATES, replace(load, rate=found)), targets).meets
        assert not figures_of(simulate(CHUNKED, RATES, replace(load, rate=found * 1.15)), targets).meets
    assert carried(CHUNKED, RATES, load, Targets(ttft_s=0.001, tpot_s=0.05), meets=False) == 0


class TestAdvice:
    LOAD, TARGETS = Load(rate=10.0, prompt=100, answer=10), Targets(1, 1)

    def rows(self, *carries):
        pairs = [(Setting(plain=2), 0.02), (Setting(plain=2, chunked=False), 0.5), (SPLIT, 0.005)]
        return [
            Row(setting, Figures((1, 2), (1, 2), (itl, itl), None, 1.0, rate >= 10, (0.9, 0.3), 1.0, 0), rate)
            for (setting, itl), rate in zip(pairs, carries, strict=True)
        ]

    def test_a_split_that_carries_more_is_taken(self):
        said = advice(self.rows(11.0, 5.0, 20.0), self.LOAD, self.TARGETS)
        assert said.startswith(
            "Take --disagg_topo=1,1: within the targets it carries 20 requests/s, plain with chunks 11"
        )
        assert "5 ms for 20" in said

    def test_plain_is_taken_where_a_split_is_hardly_better(self):
        said = advice(self.rows(19.8, 5.0, 20.0), self.LOAD, self.TARGETS)
        assert said.startswith("Take --data_parallel_size=2 --enable_chunked_prefill: ")
        assert advice(self.rows(20.0, 5.0, 0.0)[:2], self.LOAD, self.TARGETS).endswith("it carries 20 requests/s.")
        assert "1,1, carries 20 (its sides are busy for 90% and 30% of the time)" in said

    def test_where_none_will_do_it_says_what_would(self):
        said = advice(self.rows(4.0, 2.0, 3.0), self.LOAD, self.TARGETS)
        assert said.startswith("No setting of 2 workers meets the targets at 10 requests/s: plain, chunked carries")
        assert "4/s, so that about 5 workers would do." in said
        assert advice(self.rows(0.0, 0.0, 0.0), self.LOAD, self.TARGETS).startswith(
            "No setting meets the targets at any"
        )


class TestFit:
    def test_measured_steps_give_back_what_they_were_made_of(self):
        decodes = [Point(n, each, 4e-3 + 7e-6 * n + 3e-8 * n * each) for n in (1, 16, 64) for each in (100, 2000)]
        assert fit_decode(decodes) == pytest.approx((4e-3, 7e-6, 3e-8))
        steps = chunked_steps(RATES.bounds)  # of at most 256 tokens, so that 300 are 256 and 128
        prompts = [Point(1, 128, 1), Point(1, 256, 1), Point(1, 300, 1), Point(2, 128, 1), Point(4, 512, 1)]
        sizes = [
            (1, 128, 128**2 / 2),
            (1, 256, 256**2 / 2),
            (2, 384, 300**2 / 2),
            (1, 256, 128**2),
            (8, 2048, 4 * 512**2 / 2),
        ]
        made = [
            replace(point, seconds=1e-3 * count + 2e-5 * tokens + 1e-9 * seen)
            for point, (count, tokens, seen) in zip(prompts, sizes, strict=True)
        ]
        assert fit_prefill(made, steps) == pytest.approx((1e-3, 2e-5, 1e-9))

    def test_nothing_takes_less_than_no_time(self):
        # Straight through these points, a step without sequences would take -2 ms.
        found = fit_decode(
            [Point(10, 100, 1e-3), Point(20, 100, 4.2e-3), Point(20, 200, 4.3e-3), Point(40, 100, 10e-3)]
        )
        assert min(found) >= 0
        assert max(found) > 0

    def test_points_of_one_context_are_refused(self):
        with pytest.raises(ConfigError, match="The 3 measured decode steps must tell sequences from context"):
            fit_decode([Point(each, 1500, each) for each in (1, 64, 128)])

    def test_what_bench_offline_wrote_is_read(self, tmp_path):
        path = tmp_path / "offline.json"
        one = {"requests": 4, "input_tokens": 400, "output_tokens": 40, "first_token_s": 0.5, "decode_tokens_per_s": 80}
        path.write_text(json.dumps({"rounds": [one, {**one, "output_tokens": 4}]}))
        assert offline_points(path) == ([Point(4, 105, 0.05)], [Point(4, 100, 0.5)] * 2)


class TestMeasured:
    """The preset, beside what the H200 did (docs/performance.md)."""

    RATES = rates_of(Options(preset="h200-llama-3.1-8b", request_rate=1.0, transfer_gb_per_s=10.0))

    def test_steps_take_what_they_were_measured_to(self):
        preset, found = PRESETS["h200-llama-3.1-8b"], self.RATES.times
        for point in preset.decodes:
            assert found.decode(point.count, int(point.count * point.tokens)) == pytest.approx(point.seconds, rel=0.05)
        for point in preset.prompts[:-1]:
            assert found.prefill(int(point.tokens), point.tokens**2 / 2) == pytest.approx(point.seconds, rel=0.05)
        # A decode step of 64 and 448 tokens of a prompt beside it: 15.8 ms.
        assert found.mixed(64, 96_000, 448, 448**2 / 2) == pytest.approx(15.8e-3, rel=0.05)

    @pytest.mark.parametrize(
        ("clients", "prompts", "tokens_per_s", "ttft_ms", "itl_ms"),
        [(64, 256, 6888, 102, (8.0, 18.2)), (128, 384, 8481, 547, (12.4, 22.1))],
    )
    def test_a_server_under_load_does_what_it_was_measured_to(self, clients, prompts, tokens_per_s, ttft_ms, itl_ms):
        load = Load(math.inf, 1000, 1000, count=prompts, concurrency=clients)
        found = figures_of(simulate(CHUNKED, self.RATES, load), Targets(1, 1), edge=0)
        assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.07)
        assert 1000 * found.ttft_s[0] == pytest.approx(ttft_ms, rel=0.3)
        assert 1000 * found.itl_s[0] == pytest.approx(itl_ms[0], rel=0.05)
        assert 1000 * found.itl_s[1] == pytest.approx(itl_ms[1], rel=0.15)


def test_steps_are_cut_as_the_server_cuts_them():
    from hex_llm import build
    from hex_llm.config import Config

    bounds = Bounds(kv_tokens=10_000, max_decode_seqs=256)
    chunked, whole = chunked_steps(bounds), whole_steps(bounds)
    assert (chunked.tokens, whole.tokens) == (build.CHUNKED_STEP_TOKENS, build.WHOLE_STEP_TOKENS)
    assert PRESETS["h200-llama-3.1-8b"].bounds.mixed_tokens == build.GPU_MIXED_TOKENS
    for steps, config in ((chunked, Config(enable_chunked_prefill=True)), (whole, Config())):
        assert (steps.prefills, steps.padding) == (config.prefill_seqs, config.smallest_prefill)
    gpu = PRESETS["h200-llama-3.1-8b"].bounds
    assert (split_steps(gpu).tokens, split_steps(gpu).mixed_tokens) == (build.HANDED_STEP_TOKENS, 512)
    assert split_steps(replace(gpu, split_tokens=256)).mixed_tokens == 256
    assert split_steps(bounds).tokens == build.HANDED_STEP_TOKENS
    assert [chunked.padded(each) for each in (1, 128, 129, 1025, 2048)] == [128, 128, 256, 2048, 2048]


class TestCommand:
    LOAD = (PRESET, "--transfer_gb_per_s=10", "--num_requests=200", "--input_len=2000")

    def test_it_prints_a_row_for_each_setting_and_a_sentence(self, capsys, tmp_path):
        path = tmp_path / "plan.json"
        words = ["--request_rate=10", "--workers=3", "--itl_ms=12", "--tpot_ms=12", f"--json={path}"]
        assert cli.main(["bench", "plan-disagg", *self.LOAD, *words]) == 0
        out = capsys.readouterr().out
        for name in ("plain, chunked", "plain, whole prompts", " 1,2 ", " 2,1 "):
            assert name in out
        assert "\nTake --disagg_topo=" in out
        written = json.loads(path.read_text())
        assert written["advice"] in out
        assert [each["name"] for each in written["settings"]] == [str(each) for each in settings_of(3)]
        assert written["settings"][2]["figures"]["handover_s"][0] > 0

    def test_with_a_concurrency_it_shows_what_bench_serve_would(self, capsys):
        main([*self.LOAD, "--max_concurrency=16", "--workers=2"])
        assert "2 workers, 16 at once" in capsys.readouterr().out

    def test_rates_come_from_flags_files_or_the_preset(self, tmp_path):
        path = tmp_path / "offline.json"
        rounds = [
            {
                "requests": count, "input_tokens": count * size, "output_tokens": 16 * count,
                "first_token_s": 0.01 + 1e-4 * count * size + 1e-8 * count * size**2 / 2,
                "decode_tokens_per_s": count / (0.02 + 1e-3 * count),
            }
            for count in (1, 4) for size in (128, 256, 512)
        ]  # fmt: skip
        path.write_text(json.dumps({"rounds": rounds}))
        words = ["--request_rate=1", "--kv_tokens=9000", "--kv_bytes_per_token=100", "--transfer_gb_per_s=2"]
        found = parse_settings([*words, f"--measured={path}"]).rates
        assert found.times == Times(*map(pytest.approx, (0.02, 1e-3, 0.0, 0.01, 1e-4, 1e-8, 1e-4)))  # pyright: ignore[reportArgumentType]
        assert found.bounds == Bounds(9000, 256, 2048, 2048)
        assert found.link == Link(100, 2e9)
        given = parse_settings([*words, "--decode_us=4000,7,0.03", "--prefill_us=500,22,0.001", "--mixed_token_us=17"])
        assert given.rates.times == Times(*map(pytest.approx, (4e-3, 7e-6, 3e-8, 5e-4, 22e-6, 1e-9, 17e-6)))  # pyright: ignore[reportArgumentType]
        mixed = parse_settings(["--request_rate=1", PRESET, "--transfer_gb_per_s=2", "--max_decode_seqs=64"]).rates
        assert mixed.bounds == Bounds(524_288, 64, 8192, 512)
        other = parse_settings(["--request_rate=1", PRESET, "--transfer_gb_per_s=2", "--step_tokens=1024"]).rates
        assert other.times == mixed.times

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("", "One of --request_rate and --max_concurrency must be given"),
            ("--request_rate=1 --max_concurrency=2", "and not both"),
            ("--request_rate=0", "--request_rate=0.0 must be above 0"),
            ("--request_rate=inf", "--request_rate=inf must be at most 1000000"),
            ("--request_rate=1 --tpot_ms=inf", "--tpot_ms=inf must be finite"),
            ("--request_rate=1 --input_spread=11", "--input_spread=11.0 must be at most 10"),
            (
                "--request_rate=1 --measured=a --decode_us=1,1,1 --prefill_us=1,1,1",
                "--measured=a is of no use with both",
            ),
            ("--request_rate=1 --workers=0", "--workers=0 must be at least 1"),
            ("--request_rate=1 --percentile=101", "--percentile=101.0 must be at most 100"),
            ("--request_rate=1 --tpot_ms=nan", "--tpot_ms=nan must be above 0"),
            ("--request_rate=1 --preset=tpu", "--preset=tpu is not one of h200-llama-3.1-8b"),
            ("--request_rate=1", "--kv_tokens must be given, or --preset"),
            ("--request_rate=1 --kv_tokens=999", "--decode_points must be given, or --decode_us or --measured or"),
            (f"--request_rate=1 {PRESET}", "--transfer_gb_per_s must be given."),
            (f"--request_rate=1 {PRESET} --decode_points=1:2", "'1:2' must be how many, tokens of each, and millisec"),
            (f"--request_rate=1 {PRESET} --decode_points=1:9:1", "The 1 measured decode steps must tell"),
            (f"--request_rate=1 {PRESET} --prefill_us=1,-2,3", "--prefill_us=1,-2,3 must be three microseconds of at"),
            (f"--request_rate=1 {PRESET} --prefill_us=1,2,3 --prefill_points=1:2:3", "say the same thing"),
            (f"--request_rate=1 {PRESET} --measured=/no/such.json", "--measured=/no/such.json cannot be read"),
            (f"--request_rate=1 {PRESET} --measured=pyproject.toml", "is no result of hex-llm bench offline --json"),
            (f"--request_rate=1 {PRESET} --mixed_tokens=9000", "at most --step_tokens=8192"),
            (f"--request_rate=1 {PRESET} --mixed_tokens=64", "must be at least --max_decode_seqs=128"),
            (
                f"--request_rate=1 {PRESET} --split_tokens=64",
                "--split_tokens=64 must be at least --max_decode_seqs=128",
            ),
            (f"--request_rate=1 {PRESET} --json=/no/such/file", "--json=/no/such/file is in a folder"),
            (
                f"--request_rate=1 {PRESET} --transfer_gb_per_s=1 --max_model_len=500",
                "--input_len=1000 and --output_len=200 make 1200 tokens; a request can have 500",
            ),
            ("--request_rate=1 --worker=2", "There is no flag --worker; did you mean --workers?"),
            ("7", "'7' belongs to no flag"),
        ],
    )
    def test_bad_input_is_refused_with_the_value_and_the_limit(self, words, said):
        with pytest.raises(ConfigError) as refused:
            parse_settings(words.split())
        assert said in str(refused.value)

    def test_it_needs_no_jax(self):
        code = "import sys, hex_llm.bench.disagg.command; sys.exit('jax' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
