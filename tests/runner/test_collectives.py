"""What devices send each other, in compiled steps of every architecture: two sums a layer, and nothing that the formula
of docs/performance.md does not have."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.tp_overhead import LAYERS, MODELS


def compiled(*arguments):
    # How well the rest is compiled does not matter here, and takes much longer.
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-m", "benchmarks.tp_overhead", "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def decodes():
    return {row["model"]: row for row in compiled("--steps", "decode")}


@pytest.mark.parametrize("model", MODELS)
def test_devices_add_up_twice_a_layer_and_send_nothing_else(decodes, model):
    found = decodes[model]["found"]
    assert found == decodes[model]["expected"]
    assert [kind for kind, _ in found] == ["all-reduce"] * (2 * LAYERS + 1)  # and once behind the embedding


def test_steps_with_prompts_and_choosing_send_what_the_formula_says():
    rows = compiled(MODELS[0], "--tp", "4")
    assert len(rows) == 4
    assert [row["found"] for row in rows] == [row["expected"] for row in rows]
