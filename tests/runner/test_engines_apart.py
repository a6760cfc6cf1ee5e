"""Several engines in one process, each on devices of its own."""

import json
import os
import subprocess
import sys

import pytest

from tests.checkpoints import write_llama


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = write_llama(tmp_path_factory.mktemp("model"))
    command = [sys.executable, "-m", "tests.runner.engines_apart", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_an_engine_touches_no_devices_but_those_that_it_was_given(found):
    engines = found["engines"]
    assert [each["wanted"] for each in engines] == [[0], [1], [2, 3], [3]]
    for each in engines:
        assert each["state"] == each["new"] == each["ran on"] == each["wanted"]


def test_an_engine_answers_the_same_on_whichever_devices_and_whoever_is_beside_it(found):
    first, second, split, _ = (each["answers"] for each in found["engines"])
    assert first == second == split == found["again"]


def test_blocks_go_between_engines_on_other_devices_of_a_process(found):
    assert found["moved"] == []
    assert found["compiled"] == []
