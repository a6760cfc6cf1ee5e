"""The near end of the oracle process, and the models it makes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-oracle/bin/python"

_SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    # Ten times a newborn model's spread: attention then looks at some tokens more than at others, so that
    # a wrong rotation or a wrong mask shows.
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def _llama3(factor: float) -> dict[str, Any]:
    # The original context is short, so that waves are kept, blended and slowed within the tests' lengths.
    return {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "multi-head": {"num_key_value_heads": 8},
    "grouped": {},
    "one-kv-head": {"num_key_value_heads": 1},
    "theta-1e6": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "rope-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "rope-llama3-8": {"rope_parameters": _llama3(8.0)},
    "rope-llama3-32-tied": {"rope_parameters": _llama3(32.0), "tie_word_embeddings": True},
    "tied": {"tie_word_embeddings": True},
    "wide-heads": {"head_dim": 16},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "several-files": {"max_shard_size": "100KB"},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 24, "head_dim": 16},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied-odd-heads": {
        "model_type": "qwen2",
        "hidden_size": 56,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 0,
    },
}


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
            config = _SMALL | VARIANTS[variant]
            size = config.pop("max_shard_size", "1GB")
            folder = self._folder / variant
            self._call("make", folder=str(folder), config=config, seed=0, max_shard_size=size)
            self._made[variant] = folder
        return self._made[variant]

    def logits(self, folder: Path, tokens: list[int]) -> np.ndarray:
        """[len(tokens), vocab] float32."""
        out = self._folder / "logits.npy"
        self._call("logits", folder=str(folder), tokens=tokens, out=str(out))
        return np.load(out)

    def generate(self, folder: Path, tokens: list[int], num_tokens: int) -> list[int]:
        """The next tokens, each the likeliest; end tokens do not end it."""
        return self._call("generate", folder=str(folder), tokens=tokens, num_tokens=num_tokens)

    def shapes(self, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """The tensors of a checkpoint of the model that a config.json describes, by name."""
        return {name: tuple(shape) for name, shape in self._call("shapes", config=config).items()}

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
