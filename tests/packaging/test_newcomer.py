"""What a newcomer does first: the two commands of README.md, and a chat in a browser."""

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from benchmarks.newcomer import PORT, commands, is_taken
from tests.server.browser import CHROMEDRIVER, CHROMIUM
from tests.server.servers import running_server

ROOT = Path(__file__).parents[2]
REQUIRED = os.environ.get("HEX_LLM_REQUIRE_ORACLE") == "1"  # as in CI, which may skip nothing
FIRST, SECOND = commands((ROOT / "README.md").read_text())


def test_the_first_command_of_the_readme_serves_what_comes_with_it():
    assert FIRST.startswith("scripts/hex-llm serve & ")
    assert os.access(ROOT / "scripts" / "hex-llm", os.X_OK)


def test_the_commands_of_the_readme_wait_for_the_server_and_get_an_answer(tmp_path):
    with running_server(None, tmp_path / "log", ready=False) as server:
        script = f"{FIRST.partition(' & ')[2]}; {SECOND}".replace(f"localhost:{PORT}/", f"localhost:{server.port}/")
        assert script.count(str(server.port)) == 2
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=True)
    ready, end = json.JSONDecoder().raw_decode(done.stdout)
    assert ready == {"status": "ready"}
    assert "Paris" in json.loads(done.stdout[end:])["choices"][0]["message"]["content"]


@pytest.mark.skipif(
    not REQUIRED and (not (CHROMIUM and CHROMEDRIVER) or is_taken(PORT)),
    reason=f"no chromium and chromedriver on the PATH, or another server on port {PORT}.",
)
def test_the_whole_path_takes_less_than_five_minutes_and_leaves_nothing():
    with tempfile.TemporaryDirectory() as folder:  # a short path: Chromium has sockets there
        environment = os.environ | {"TMPDIR": folder}
        command = [ROOT / "scripts" / "newcomer"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(Path(folder).iterdir()) == []
    seconds = re.findall(r"^\| .* \| \**([0-9.]+)\** \|$", done.stdout, re.MULTILINE)
    assert len(seconds) == 7
    assert float(seconds[-1]) < 300
