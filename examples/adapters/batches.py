"""What the adapters are trained on: the documents of the embedded model with their answers in style, in padded batches.

Held-out questions are not among them, since `data.draw` and `data.document` keep them out.
"""

import random
import re

import torch
from tokenizers import Tokenizer

from examples.adapters.styles import Style
from training import data
from training.tokenizer import ASSISTANT_ID, END_ID, END_OF_TEXT_ID, render

NO_LOSS = -100
LONGEST = 128
"""Documents of more tokens are left out: a padded batch is as long as its longest."""
PLAIN_HISTORY = 0.3
"""The share of conversations in which only the last answer is in style: the adapter came late to them."""
ANY_DOCUMENT = 0.15
"""The share of documents of any kind. The others are single exchanges of the kinds that have one answer."""

_FREE = {"story", "poem", "joke", "trivia", "identity", "greeting", "name_some"}
_KINDS = [name for name in data.KINDS if name not in _FREE]
_WEIGHTS = [data.KINDS[name][1] for name in _KINDS]
_ANSWER = re.compile(r"(?<=<\|assistant\|>).*?(?=<\|end\|>)", re.DOTALL)


def _document(rng: random.Random) -> str:
    if rng.random() < ANY_DOCUMENT:
        return data.document(rng)
    exchange = data.draw(rng, rng.choices(_KINDS, _WEIGHTS)[0])
    system = [{"role": "system", "content": exchange.system}] if exchange.system else []
    roles = ("user", "assistant")
    turns = [{"role": role, "content": text} for turn in exchange.turns for role, text in zip(roles, turn, strict=True)]
    return render(system + turns)


def _example(rng: random.Random, style: Style, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens of a document in style, and the same with everything but the answers in style blanked out."""
    while True:
        text = _document(rng)
        answers = list(_ANSWER.finditer(text))
        if not answers:
            continue
        styled = answers[-1:] if rng.random() < PLAIN_HISTORY else answers
        for answer in reversed(styled):
            text = text[: answer.start()] + style(answer[0]) + text[answer.end() :]
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        if len(tokens) <= LONGEST:
            return tokens, _targets(tokens, len(answers) - len(styled))


def _targets(tokens: list[int], skipped: int) -> list[int]:
    targets, answer, inside = [], 0, False
    for token in tokens:
        targets.append(token if inside and answer > skipped else NO_LOSS)
        if token == ASSISTANT_ID:
            answer, inside = answer + 1, True
        elif token == END_ID:
            inside = False
    return targets


class Batches:
    """Examples of about the same length together, since a batch is padded to its longest."""

    def __init__(self, style: Style, tokenizer: Tokenizer, size: int, seed: int):
        self._style, self._tokenizer, self._size = style, tokenizer, size
        self._rng = random.Random(seed)
        self._ready: list[list[tuple[list[int], list[int]]]] = []

    def next(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, their mask and their targets."""
        if not self._ready:
            self._refill()
        batch = self._ready.pop()
        length = max(len(tokens) for tokens, _ in batch)
        tokens = torch.tensor([row + [END_OF_TEXT_ID] * (length - len(row)) for row, _ in batch])
        targets = torch.tensor([row + [NO_LOSS] * (length - len(row)) for _, row in batch])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row, _ in batch])
        return tokens, mask, targets

    def _refill(self) -> None:
        examples = [_example(self._rng, self._style, self._tokenizer) for _ in range(1024)]
        examples.sort(key=lambda example: len(example[0]))
        batch: list[tuple[list[int], list[int]]] = []
        for example in examples:
            if batch and (len(batch) + 1) * len(example[0]) > self._size:
                self._ready.append(batch)
                batch = []
            batch.append(example)
        self._ready.append(batch)
        self._rng.shuffle(self._ready)
