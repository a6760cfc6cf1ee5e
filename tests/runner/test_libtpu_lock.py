"""A lock that is left over does not keep a server from its TPU; one that is held names its holder."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from hex_llm.errors import DeviceBusy
from hex_llm.runner.libtpu_lock import clear_lock


@pytest.fixture
def lock(tmp_path) -> Path:
    path = tmp_path / "lock"
    path.touch()
    return path


def test_a_lock_that_nobody_holds_is_removed(lock, caplog):
    with caplog.at_level(logging.INFO):
        clear_lock(lock, {})
    assert not lock.exists()
    assert str(lock) in caplog.text
    clear_lock(lock, {})


@pytest.mark.parametrize("call", ["lockf", "flock"])
def test_a_lock_that_is_held_stays_and_its_holder_is_named(lock, call):
    program = (
        "import fcntl, sys\n"
        f"file = open({str(lock)!r}, 'w')\n"
        f"fcntl.{call}(file, fcntl.LOCK_EX)\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        holder.stdout.readline()
        with pytest.raises(DeviceBusy, match=f"process {holder.pid},") as caught:
            clear_lock(lock, {"JAX_PLATFORMS": "tpu,cpu"})
        assert caught.value.exit_code == 4
        assert lock.exists()
    clear_lock(lock, {"JAX_PLATFORMS": "tpu,cpu"})
    assert not lock.exists()


@pytest.mark.parametrize("environ", [{"JAX_PLATFORMS": "cpu"}, {"TPU_VISIBLE_CHIPS": "0"}])
def test_a_lock_that_is_not_for_this_process_is_left_alone(lock, environ):
    clear_lock(lock, environ)
    assert lock.exists()
