"""Weights in few bits, on the devices that share them."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("devices", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_weights_brought_to_few_bits_are_near_to_what_they_were_on_every_device(devices: int) -> None:
    command = [sys.executable, "-m", "tests.loader.few_bits_on_devices", str(devices)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
