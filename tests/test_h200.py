"""What `benchmarks/h200.py` can show without an H200: that it counts, judges, writes and goes on as it says."""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import h200, h200_checks
from benchmarks.h200_model import word, write_model
from benchmarks.h200_part import Results, Settings
from benchmarks.h200_settings import LLAMA_8B, PLANS, TINY, prefill_flops
from benchmarks.h200_step import SAMPLINGS, Clock, finish, lengths, make_engine, start_decodes, time_steps
from benchmarks.h200_table import FIGURES, Figure, derived, rows, table
from benchmarks.h200_trace import Kernel, profile, read_profile, tracing
from hex_llm.bench.random_text import RandomText
from hex_llm.config import Config
from hex_llm.kernels.paged_attention import api
from hex_llm.text.tokenizer import Tokenizer


def settings(folder, **changes) -> Settings:
    values = {
        "plan_name": "tiny",
        "scratch": str(folder),
        "results": str(folder / "results.json"),
        "deadline": time.time() + 60,
        "peer_python": sys.executable,
    }
    return Settings(**values | changes)


@pytest.mark.parametrize(
    ("sense", "value", "verdict"),
    [
        ("at least", 9.0, "SHORT"),
        ("at least", 10.0, "ok"),
        ("at least", 20.0, "goal"),
        ("at most", 21.0, "SHORT"),
        ("at most", 15.0, "ok"),
        ("at most", 5.0, "goal"),
        ("at most", None, "missing"),
    ],
)
def test_a_figure_is_judged_by_what_it_must_reach_and_by_the_goal(sense, value, verdict):
    must, goal = (10.0, 20.0) if sense == "at least" else (20.0, 10.0)
    assert Figure("x", "x", must, goal, sense).judge(value) == verdict


def test_the_table_has_what_was_measured_and_what_should_have_been():
    parts = {"step": {"status": "stopped after 120 s"}, "peer": {"status": "done"}}
    values = {"step64": 8.0, "peer_decode": 400.0}
    values |= derived(values)
    verdicts = {row["figure"]: row["verdict"] for row in rows(values, parts)}
    assert verdicts["step64"] == "ok"
    assert verdicts["step128"] == "missing"  # its part ran
    assert "serve64" not in verdicts  # its part did not
    assert values["over_transformers"] == pytest.approx(64 / 0.008 / 400)
    text = table(values, parts)
    assert "step: stopped after 120 s" in text
    assert "8.00" in text


def test_every_figure_has_one_name_and_a_part_that_exists():
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
    assert {figure.part for figure in FIGURES} <= {"", *(part.name for part in h200.PARTS)}


def test_kernels_that_overlap_count_once_and_gaps_count_as_idle():
    # One kernel every 10, each of 8, and a second one beside its last half: busy for 8 of 10.
    kernels = [Kernel("gemm", "jit_forward_64", start, start + 8) for start in range(0, 1000, 10)]
    kernels += [Kernel("argmax", "jit_choose_64", start + 4, start + 8) for start in range(0, 1000, 10)]
    found = profile(kernels)
    assert found.idle_share == pytest.approx(0.2, abs=0.01)
    assert found.share(("choose",)) == pytest.approx(1 / 2, abs=0.01)
    assert found.share(("nothing",)) is None
    assert list(found.by("name")) == ["gemm", "argmax"]


def test_the_8k_prompt_is_132_tflop():
    assert prefill_flops(LLAMA_8B, 8192) / 1e12 == pytest.approx(132, abs=0.1)


def test_every_token_is_a_word_of_its_own(tmp_path):
    tokenizer = Tokenizer.load(write_model(tmp_path, TINY))
    ids = list(range(TINY["vocab_size"]))
    texts = [tokenizer.piece(id) for id in ids]
    assert len(set(texts)) == tokenizer.vocab_size == len(ids)
    assert tokenizer.decode(ids) == " ".join(word(id) for id in ids)
    assert tokenizer.encode(tokenizer.decode(ids[1:])) == ids[1:]
    assert not tokenizer.eos_ids
    random = RandomText(tokenizer, np.random.default_rng(0))
    assert len(tokenizer.encode(random.of_tokens(100, []))) == 100


@pytest.mark.parametrize("plan", PLANS)
def test_the_flags_of_every_part_are_flags(plan):
    for flags in dataclasses.asdict(PLANS[plan].flags).values():
        Config.from_args(list(flags))


@pytest.mark.parametrize("mixed", [False, True])
def test_attention_that_is_wrong_is_seen(tmp_path, monkeypatch, mixed):
    case, sizes = h200_checks.Case(mixed=mixed), settings(tmp_path).plan.sizes
    assert h200_checks.check(sizes, case, 1) < 0.02
    right = api.paged_attention

    def wrong(q, k, v, pages, batch, *, implementation=None, **options):
        if implementation is None:
            batch = dataclasses.replace(batch, kv_len=jnp.maximum(batch.kv_len - 3, 1))
        return right(q, k, v, pages, batch, implementation=implementation, **options)

    monkeypatch.setattr(api, "paged_attention", wrong)
    assert h200_checks.check(sizes, case, 1) > 0.02


def test_steps_are_timed_at_the_context_asked_for(tmp_path):
    told = settings(tmp_path)
    engine, _ = make_engine(told, [*told.plan.flags.serve, "--no-warmup"])
    clock = Clock(engine._runner)
    engine._runner = clock
    requests = start_decodes(engine, 8, told.plan.sizes, 10, SAMPLINGS["sampling"])
    before = lengths(requests)
    timing = time_steps(engine, clock, 10)
    contexts = (before + lengths(requests)) / 2
    assert clock.steps == 10
    assert abs(contexts - told.plan.sizes.step_context).max() <= 3
    assert 0 < timing["dispatch_ms"] < timing["python_ms"] <= timing["step_ms"]
    with tracing(tmp_path / "trace"):
        for _ in range(4):
            engine.step()
    finish(engine, requests)
    engine.check()
    share = read_profile(tmp_path / "trace").share(("choose",))
    assert share is not None
    assert 0 < share < 1


PART = """
import subprocess, sys, time
from benchmarks.h200_part import run_part
def measure(settings, results):
    results.figure("step64", 7.5)
    with results.case("bad"):
        raise ValueError("no such thing")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({sleep})"])
    results.detail("child", child.pid)
    child.wait()
if __name__ == "__main__":
    run_part(measure)
"""


def run_a_part(tmp_path, monkeypatch, *, sleep: float, room: float) -> dict:
    """`benchmarks` has no __init__.py, so that a part may lie in another folder of that name."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/h200_probe.py").write_text(PART.format(sleep=sleep))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = argparse.Namespace(quick=False, shape="tiny", peer_python=sys.executable)
    return h200._run(h200.Part("probe", 60), arguments, tmp_path, room)


def test_a_case_that_fails_is_told_and_the_part_goes_on(tmp_path, monkeypatch):
    found = run_a_part(tmp_path, monkeypatch, sleep=0, room=60)
    assert found["status"] == "failed with 1"
    assert found["figures"] == {"step64": 7.5}
    assert found["errors"] == ["bad: ValueError: no such thing"]


def test_a_part_that_is_stopped_keeps_what_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(h200, "_GRACE_S", 0.1)
    found = run_a_part(tmp_path, monkeypatch, sleep=60, room=5)
    assert found["status"].startswith("stopped after")
    assert found["figures"] == {"step64": 7.5}
    deadline = time.monotonic() + 10
    while runs(found["details"]["child"]):  # a signal may take a moment
        assert time.monotonic() < deadline, "the part has left something behind"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended, reaped or not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] != "Z"


def test_what_is_recorded_is_on_the_disk_at_once(tmp_path):
    results = Results(tmp_path / "x.json")
    results.figure("copy", 4.2)
    assert json.loads((tmp_path / "x.json").read_text())["figures"] == {"copy": 4.2}
    results.detail("log", "said")
    assert json.loads((tmp_path / "x.json").read_text())["details"] == {"log": "said"}
