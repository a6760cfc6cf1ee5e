"""Training rows: documents tokenized and packed end to end, made in worker processes without jax."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training import data
from training.tokenizer import BEGIN_ID, END_OF_TEXT_ID

SHORT_ROW = 512
LONG_ROW = 2048
LONG_ONE_IN = 8
"""One batch in this many holds long conversations, so that the whole context is trained."""


@cache
def _load(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


@dataclass(frozen=True)
class RowMaker:
    """Makes the batch of a step from nothing but the seed and the step's index."""

    tokenizer: Path
    seed: int
    tokens: int

    def shapes(self) -> list[tuple[int, int]]:
        return [(max(1, self.tokens // length), length) for length in (SHORT_ROW, LONG_ROW)]

    def __call__(self, index: int) -> np.ndarray:
        tokenizer = _load(self.tokenizer)
        rng = random.Random(f"{self.seed}-{index}")
        short, long = self.shapes()
        if index % LONG_ONE_IN == LONG_ONE_IN - 1:
            return _pack(rng, data.long_document, tokenizer, *long)
        return _pack(rng, data.document, tokenizer, *short)


def _pack(
    rng: random.Random, make: Callable[[random.Random], str], tokenizer: Tokenizer, rows: int, length: int
) -> np.ndarray:
    """Rows filled with whole documents; a document longer than a row is cut."""
    packed = np.full((rows, length), END_OF_TEXT_ID, np.int16)
    row, used = 0, 0
    while row < rows:
        text = "".join(make(rng) for _ in range(64 if length == SHORT_ROW else 4))
        tokens = np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int16)
        for piece in np.split(tokens, np.flatnonzero(tokens == BEGIN_ID)[1:]):
            piece = piece[:length]
            if used + len(piece) > length:
                row, used = row + 1, 0
            if row == rows:
                break
            packed[row, used : used + len(piece)] = piece
            used += len(piece)
    return packed
