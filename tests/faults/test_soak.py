"""F36 in seconds: `benchmarks/soak_server.py`, which runs for a day, looks at each rest and judges what it saw."""

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.soak_server import drifted

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak_server.py"
STRETCH = re.compile(r"stretch (\d): \d+ requests .* (\d+) given up, \d+ refused, 0 lost; first token p50 \d+ ms, p99")


def test_a_soak_of_seconds_looks_at_the_server_at_each_rest():
    # How soon tokens come says more about the other tests on these cores.
    flags = ("--hours=0.0025", "--rests=3", "--warm-up=100", "--concurrency=16", "--drift=100", "--ping-ms=10000")
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    stretches = STRETCH.findall(done.stdout)
    assert [number for number, _ in stretches] == ["1", "2", "3"], done.stdout
    assert all(int(given_up) for _, given_up in stretches), done.stdout
    assert all(name in done.stdout for name in ("front", "engine", "text", "this one"))


def test_a_soak_whose_first_tokens_come_later_and_later_fails():
    assert drifted([0.10], 0.1) == []
    assert drifted([0.10, 0.11], 0.101) == []
    assert drifted([0.10, 0.10, 0.10, 0.105, 5.0, 0.10], 0.1) == [], "a stretch in which others had the machine"
    (words,) = drifted([0.10, 0.10, 0.10, 9.0, 0.12, 0.12, 0.12], 0.1)
    assert "is 120 ms in the later half of the stretches, 20 % above the 100 ms of the earlier one" in words
