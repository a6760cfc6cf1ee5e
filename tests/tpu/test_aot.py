"""Whole engines at real sizes, compiled for TPUs: what `hex_llm.bench.tpu_aot` says of them.

One row of its table is checked always; `pytest -m slow tests/tpu/test_aot.py` checks the others, which takes minutes.
"""

import json
import os
import subprocess

import pytest

from hex_llm.bench.tpu_aot import ROWS
from tests.tpu.compiler import PYTHON, ROOT, SILENT

FAST = "Llama-3.1-8B-Instruct@v5e:2x2"
# Tokens in the KV cache, as docs/performance.md has them, of each row.
TOKENS = {
    "Llama-3.1-8B-Instruct@v5e:2x2": 292_640,
    "Llama-3.1-8B-Instruct@v6e:1x1": 101_088,
    "Llama-3.1-70B-Instruct@v5e:4x4": 137_280,
    "Llama-3.3-70B-Instruct@v6e:2x4": 295_424,
    "gemma-2-27b-it@v5e:2x4": 103_648,
    "Mixtral-8x7B-Instruct-v0.1@v5e:2x4": 231_072,
    "Mixtral-8x7B-Instruct-v0.1@v5e:4x4": 517_664,
    "Llama-4-Scout-17B-16E-Instruct@v5e:4x4": 59_328,
}
EXPERTS = ("Mixtral", "Scout")


def run(*arguments) -> subprocess.CompletedProcess[str]:
    """In a process that has the compiler."""
    env = os.environ | SILENT | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([PYTHON, *arguments], capture_output=True, text=True, check=False, env=env, cwd=ROOT)


@pytest.fixture
def measured(compiler, tmp_path):
    """Figures of a row; skipped where there is no compiler."""

    def measure(name: str) -> dict:
        out = tmp_path / "out.json"
        done = run("-m", "hex_llm.bench.tpu_aot", "--only", name, "--json", out)
        assert done.returncode == 0, done.stderr
        (result,) = json.loads(out.read_text())
        return result

    return measure


@pytest.mark.parametrize(
    "name", [pytest.param(row.name, marks=[] if row.name == FAST else pytest.mark.slow) for row in ROWS]
)
def test_a_models_largest_steps_fit_the_chips_with_our_kernels_and_two_sums_a_layer(measured, name):
    result = measured(name)
    decode, prefill = result["steps"]
    taken = result["weights"] + result["state"] + result["temporaries"] + result["kv"]
    assert taken <= result["usable"]
    assert all(step["peak"] <= result["usable"] for step in result["steps"])
    # Had a layer's pages or weights to be copied, it would show here.
    assert decode["temporaries"] < 0.1 * result["weights"]
    for step, kernel in ((decode, "paged_attention_decode"), (prefill, "paged_attention_prefill")):
        assert step["collectives"] == ({"all-reduce": 2} if result["devices"] > 1 else {})
        assert step["kernels"]["paged_attention_write"] == step["kernels"][kernel] == 1
        if name.startswith(EXPERTS):
            assert step["kernels"]["grouped_matmul"] == 2
    assert result["tokens"] == pytest.approx(TOKENS[name], rel=0.02)


def test_every_row_has_its_figures():
    assert {row.name for row in ROWS} == TOKENS.keys()


@pytest.mark.usefixtures("compiler")
def test_a_model_that_does_not_fit_is_said_so_and_fails():
    rows = "from hex_llm.bench import tpu_aot as t; t.ROWS = (t.Row('meta-llama/Llama-3.1-70B-Instruct', 'v5e:2x4'),)"
    done = run("-c", f"{rows}; raise SystemExit(t.main([]))")
    assert done.returncode == 1
    assert "Llama-3.1-70B-Instruct@v5e:2x4 does not fit: The model needs 16.5" in done.stderr
    assert "only a smaller one fits" in done.stderr
