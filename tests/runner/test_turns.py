"""Work that several processes would do at the same time is done by one after the other."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hex_llm.runner import turns
from hex_llm.runner.turns import turn


def test_one_at_a_time_and_nothing_is_left_behind(tmp_path):
    lock, inside, most = tmp_path / "new" / "lock", [0], [0]

    def work() -> None:
        for _ in range(20):
            with turn(lock):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.0005)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert most == [1]
    assert not list(lock.parent.iterdir())


def hold_in_another_process(lock: Path) -> subprocess.Popen[str]:
    program = (
        "import sys, time; from pathlib import Path; from hex_llm.runner.turns import turn\n"
        "with turn(Path(sys.argv[1])): print('holds', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "holds\n"
    return process


def test_another_process_is_waited_for_and_one_that_is_killed_is_not(tmp_path):
    with hold_in_another_process(tmp_path / "lock") as process:
        threading.Timer(0.5, process.kill).start()
        started = time.monotonic()
        with turn(tmp_path / "lock"):
            assert 0.3 < time.monotonic() - started < 10


def test_after_a_long_wait_the_work_is_done_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "_WAIT_S", 0.2)
    with hold_in_another_process(tmp_path / "lock") as process:
        with turn(tmp_path / "lock"):
            assert process.poll() is None
        process.kill()


@pytest.mark.parametrize("lock", [None, Path("/proc/no/such/folder/lock")])
def test_where_there_is_no_place_for_a_lock_nobody_waits(lock):
    with turn(lock), turn(lock):
        pass


def test_what_the_body_raises_is_passed_on_and_the_lock_is_free(tmp_path):
    with pytest.raises(ZeroDivisionError), turn(tmp_path / "lock"):
        raise ZeroDivisionError
    assert not (tmp_path / "lock").exists()


def test_a_lock_that_was_removed_before_it_was_taken_is_made_anew(tmp_path, monkeypatch):
    lock, opened = tmp_path / "lock", []

    def open_and_remove_once(path, *arguments):
        opened.append(path)
        file = real_open(path, *arguments)
        if len(opened) == 1:
            lock.unlink()
        return file

    real_open = os.open
    monkeypatch.setattr(os, "open", open_and_remove_once)
    with turn(lock):
        assert lock.exists()
