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
}
EXPERTS = ("Mixtral", "Scout")


@pytest.fixture
def measured(compiler, tmp_path):
    """Figures of a row, from a process that has the compiler; skipped where there is none."""

    def measure(name: str) -> dict:
        out = tmp_path / "out.json"
        command = [PYTHON, "-m", "hex_llm.bench.tpu_aot", "--only", name, "--json", out]
        env = os.environ | SILENT | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT)
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
        assert step["collectives"] == {"all-reduce": 2}
        assert step["kernels"]["paged_attention_write"] == step["kernels"][kernel] == 1
        if name.startswith(EXPERTS):
            assert step["kernels"]["gmm"] == 2
    assert result["tokens"] == pytest.approx(TOKENS[name], rel=0.02)


def test_every_row_has_its_figures():
    assert {row.name for row in ROWS} == TOKENS.keys()
