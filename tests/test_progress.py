"""Bytes that come: to a terminal a bar, to anything else lines."""

import logging
import os
import pty
import subprocess
import sys

from hex_llm import progress as progress_module
from hex_llm.progress import progress

DRAW = """
import time
from hex_llm.progress import progress, tell_nobody
with progress("Doing", "Did %s", 4_000_000, tell_nobody) as advance:
    for _ in range(4):
        advance(1_000_000)
        time.sleep(0.3)
"""


def test_a_log_has_lines_with_the_rate_and_the_time_left(monkeypatch, caplog, capfd):
    caplog.set_level(logging.INFO, "hex_llm")
    monkeypatch.setattr(progress_module, "_SAY_S", -1.0)
    shares = []
    with progress("Doing it", "Did %s of it", 4_000_000, shares.append) as advance:
        advance(1_000_000)
        advance(3_000_000)
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("Doing it: 1.00 MB of 4.00 MB, ")
    assert said[0].endswith(" s left.")
    assert "B/s, " in said[0]
    assert said[-1].startswith("Did 4.00 MB of it in ")
    assert shares == [0.25, 1.0]
    assert "\x1b" not in capfd.readouterr().err


def test_a_terminal_has_a_bar_with_them():
    ours, its = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen([sys.executable, "-c", DRAW], stderr=its, env=environment) as process:
        os.close(its)
        drawn = b""
        try:
            while chunk := os.read(ours, 4096):
                drawn += chunk
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0
    text = drawn.decode()
    assert "Doing" in text
    assert "4.0/4.0 MB" in text
    assert "MB/s" in text
    assert "0:00:00" in text
