"""Adapters of random numbers for a model in a folder."""

from pathlib import Path

import numpy as np

from hex_llm.build import adapters_of, find_model
from hex_llm.config import Config
from tests.lora.adapters import peft_config, random_pairs, tensors_of, write_adapter


class Adapters:
    """Writes adapters for a model."""

    def __init__(self, model: Path):
        self.modules = adapters_of(find_model(Config(model=str(model))))

    def tensors(self, seed: int, rank: int = 2, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        pairs = random_pairs(*(names or self.modules), rank=rank, modules=self.modules, seed=seed)
        return tensors_of({name: (0.4 * a, 0.4 * b) for name, (a, b) in pairs.items()})

    def write(self, folder: Path, seed: int, rank: int = 2, **fields) -> Path:
        return write_adapter(folder, peft_config(r=rank, lora_alpha=2 * rank) | fields, self.tensors(seed, rank))
