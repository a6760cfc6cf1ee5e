"""The near end of the oracle process, and the models it makes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.variants import VARIANTS

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-oracle/bin/python"


class OracleMissingError(Exception):
    """The oracle's environment is not there, or has no torch."""


class Oracle:
    """transformers, in a process with torch. Models are float32."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._made: dict[str, Path] = {}
        if not PYTHON.exists():
            raise OracleMissingError(".venv-oracle is missing; `scripts/setup oracle` makes it")
        self._errors = (folder / "stderr.txt").open("w")
        self._process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("oracle_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"PYTHONPATH": ""},
        )
        if not self._answer():
            raise OracleMissingError(f"the oracle did not start: {self._last_words()}")

    def make(self, variant: str) -> Path:
        """The folder of a tiny random checkpoint, as transformers saves it."""
        if variant not in self._made:
            config, size = dict(VARIANTS[variant]), "1GB"
            model_class, size = config.pop("class"), config.pop("max_shard_size", size)
            folder = self._folder / variant
            self._call("make", folder=str(folder), config=config, model_class=model_class, seed=0, max_shard_size=size)
            self._made[variant] = folder
        return self._made[variant]

    def logits(self, folder: Path, tokens: list[int]) -> np.ndarray:
        """[len(tokens), vocab] float32."""
        out = self._folder / "logits.npy"
        self._call("logits", folder=str(folder), tokens=tokens, out=str(out))
        return np.load(out)

    def adapter(self, folder: Path, target: Path, **settings: Any) -> Path:
        """Saves a random adapter of a model, by the settings of PEFT's LoraConfig."""
        self._call("adapter", folder=str(folder), target=str(target), settings=settings)
        return target

    def merged_logits(self, folder: Path, adapter: Path, tokens: list[int]) -> np.ndarray:
        """As `logits`, of the model with an adapter merged into its weights."""
        out = self._folder / "logits.npy"
        self._call("merged_logits", folder=str(folder), adapter=str(adapter), tokens=tokens, out=str(out))
        return np.load(out)

    def generate(self, folder: Path, tokens: list[int], num_tokens: int) -> list[int]:
        """The next tokens, each the likeliest; end tokens do not end it."""
        return self._call("generate", folder=str(folder), tokens=tokens, num_tokens=num_tokens)

    def shapes(self, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """The tensors of a checkpoint of the model that a config.json describes, by name."""
        return {name: tuple(shape) for name, shape in self._call("shapes", config=config).items()}

    def mxfp4(self, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """What blocks and scales of MXFP4 stand for."""
        paths = [self._folder / f"mxfp4_{i}.npy" for i in range(3)]
        np.save(paths[0], blocks)
        np.save(paths[1], scales)
        self._call("mxfp4", **dict(zip(("blocks", "scales", "out"), map(str, paths), strict=True)))
        return np.load(paths[2])

    def bitsandbytes(self, folder: Path, target: Path, **settings: Any) -> dict[str, np.ndarray]:
        """Saves a model in few bits as transformers does. What its matrices then stand for, by module."""
        out = self._folder / "bitsandbytes.npz"
        self._call("bitsandbytes", folder=str(folder), settings=settings, target=str(target), out=str(out))
        return dict(np.load(out))

    def compressed_tensors(
        self, target: Path, module: str, form: str, weights: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Saves a matrix as the library does. What it then stands for."""
        given, out = self._folder / "given.npz", self._folder / "compressed.npy"
        np.savez(given, **arrays)  # pyright: ignore[reportArgumentType]
        paths = {"arrays": str(given), "target": str(target), "out": str(out)}
        self._call("compressed_tensors", form=form, weights=weights, module=module, **paths)
        return np.load(out)

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()

    def _call(self, command: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._answer() or {"error": f"the oracle died: {self._last_words()}"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def _last_words(self) -> str:
        self._process.wait()
        lines = (self._folder / "stderr.txt").read_text().splitlines()
        return lines[-1] if lines else "no word"
