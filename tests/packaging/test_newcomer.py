"""What a newcomer does first: the two commands of README.md, and a chat in a browser."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.newcomer import PORT, commands
from tests.server.servers import running_server

ROOT = Path(__file__).parents[2]
FIRST, SECOND = commands((ROOT / "README.md").read_text())


def test_the_first_command_of_the_readme_serves_what_comes_with_it():
    assert FIRST == "scripts/hex-llm serve &"
    assert os.access(ROOT / "scripts" / "hex-llm", os.X_OK)


def test_the_second_command_of_the_readme_waits_for_the_server_and_gets_an_answer(tmp_path):
    with running_server(None, tmp_path / "log", ready=False) as server:
        there = SECOND.replace(f"localhost:{PORT}", f"localhost:{server.port}")
        assert there != SECOND
        done = subprocess.run(["bash", "-c", there], capture_output=True, text=True, timeout=120, check=True)
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_the_whole_path_takes_less_than_five_minutes_and_leaves_nothing(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([ROOT / "scripts" / "newcomer"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = re.findall(r"^\| .* \| \**([0-9.]+)\** \|$", done.stdout, re.MULTILINE)
    assert len(seconds) == 7
    assert float(seconds[-1]) < 300
    assert list(tmp_path.iterdir()) == []
