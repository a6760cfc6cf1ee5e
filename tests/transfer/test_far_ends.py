"""Porters of several processes: what becomes of one when another is killed, or stands still."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from hex_llm.engine.handover import Came, Complete, Left, Lost, Wanted
from tests.transfer.far_end import ROOT, FarEnd
from tests.transfer.parts import End, wait_until


@pytest.fixture(params=["unix host", "unix jax"])
def start(request, tmp_path):
    """Starts ends: those with settings of a far one in processes of their own."""
    kind, path = request.param.split()
    with contextlib.ExitStack() as stack:
        numbers = iter(range(10))

        def start(far, **settings):
            address = "tcp:127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/{next(numbers)}"
            end = FarEnd(address, path=path, **settings) if far else End(address, path=path, **settings)
            stack.callback(end.kill if isinstance(end, FarEnd) else end.porter.close)
            return end

        yield start


def fetch_all(near, request_id, address):
    near.porter.fetch(request_id, address, 0)
    parts = 0
    while isinstance(word := near.next(timeout=20), Came):
        near.take(word.part)
        parts += 1
    assert isinstance(word, Complete), word
    near.porter.acknowledge(request_id)
    return parts


def test_an_engine_outlives_the_one_that_it_fetches_from(start):
    far, near = start(True, num_parts=50, delay=0.01), start(False)
    assert fetch_all(near, "whole", far.address) == 50
    assert far.read() == ["taken", "whole"]
    near.porter.fetch("one", far.address, 0)
    near.take(near.next(Came).part)
    far.kill()
    while isinstance(word := near.next(), Came):
        near.take(word.part)
    assert isinstance(word, Lost)
    wait_until(lambda: near.num_held == 0)


def test_an_engine_outlives_the_one_that_fetches_from_it(start):
    near = start(False, silence=3.0)
    far = start(True, source=near.address, fetch=["one"], delay=0.01)
    assert near.next(Wanted, timeout=20) == Wanted("one", 0)
    for number in range(10):
        wait_until(near.porter.has_room)
        near.send("one", 4 * number, 4)
    assert far.read() == ["came", "one", 0]
    far.kill()
    while (word := near.next()) != Left("one"):
        assert not isinstance(word, Wanted)
    wait_until(lambda: near.num_held == 0)
    assert near.porter.has_room()


def test_a_source_that_stands_still_is_given_up(start):
    far, near = start(True, num_parts=1000, delay=0.002), start(False, silence=1.0)
    near.porter.fetch("one", far.address, 0)
    near.take(near.next(Came, timeout=20).part)
    far.stop()
    started = time.monotonic()
    while isinstance(word := near.next(), Came):
        near.take(word.part)
    assert isinstance(word, Lost)
    assert time.monotonic() - started < 20
    wait_until(lambda: near.num_held == 0)
    # When it goes on it finds that nobody is there, and can be asked again.
    far.go_on()
    assert far.read() == ["left", "one"]


def test_one_that_fetches_and_stands_still_is_dropped(start):
    near = start(False, silence=1.0)
    far = start(True, source=near.address, fetch=["one"])
    assert near.next(Wanted, timeout=20)
    far.stop()
    for number in range(6):
        if near.porter.has_room():
            near.send("one", 4 * number, 4)
    while near.next() != Left("one"):
        pass
    wait_until(lambda: near.num_held == 0)
    far.go_on()
    while (word := far.read())[0] == "came":
        pass
    assert word[:2] == ["lost", "one"]


def test_engines_on_different_numbers_of_devices_understand_each_other():
    # With fewer threads than devices need, XLA's CPU backend can wait for itself.
    flags = {"JAX_NUM_CPU_DEVICES": "8", "NPROC": "40", "PJRT_NPROC": "40", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.transfer.eight_devices"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | flags, capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr[-2000:]
