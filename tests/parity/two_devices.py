"""A program for the parity tests: a model on two virtual devices. Folders come in as lines of JSON, logits go to files.

In a process of its own, because how many devices there are is settled when JAX starts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


class TwoDevices:
    """The near end of the process."""

    def __init__(self, folder: Path):
        self._out = folder / "logits.npy"
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT)}
        self._errors = (folder / "stderr.txt").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parity.two_devices"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=os.environ | flags,
        )

    def logits(self, folder: Path) -> np.ndarray:
        """As `test_logits.logits_of`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), str(self._out)]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer == "done\n", answer or Path(self._errors.name).read_text()[-2000:]
        return np.load(self._out)

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()


def main() -> None:
    from tests.parity.test_logits import load_model, logits_of

    for line in sys.stdin:
        folder, out = json.loads(line)
        try:
            np.save(out, logits_of(*load_model(Path(folder), num_devices=2)))
            answer = "done"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(answer, flush=True)


if __name__ == "__main__":
    main()
