"""Texts of random words that a tokenizer makes an exact number of tokens of."""

import itertools

import numpy as np

from hex_llm.errors import ConfigError
from hex_llm.text.tokenizer import Tokenizer

MAX_WORDS = 4096
_TRIES = 100
_REPAIRS = 20


class RandomText:
    """Words that are one token each wherever they stand, so that texts of them have the length one asks for."""

    def __init__(self, tokenizer: Tokenizer, random: np.random.Generator) -> None:
        self._tokenizer = tokenizer
        self._random = random
        self._words = _words(tokenizer, random)

    def words(self, count: int) -> list[str]:
        return [self._words[index] for index in self._random.integers(0, len(self._words), count)]

    def of_tokens(self, tokens: int, start: list[str]) -> str:
        """A text of so many tokens, the special ones that come with it included, that starts with these words."""
        special = len(self._tokenizer.encode(""))
        for _ in range(_TRIES):
            words = [*start, *self.words(max(tokens - special - len(start), 0))]
            for _ in range(_REPAIRS):
                text = "".join(words).strip()
                surplus = len(self._tokenizer.encode(text)) - tokens
                if surplus == 0 and text:
                    return text
                words = words[: max(len(words) - surplus, 1)] if surplus > 0 else [*words, *self.words(-surplus)]
        raise ConfigError(
            f"No text of {tokens} tokens was found for this tokenizer, which adds {special} of its own to each text."
        )


def _words(tokenizer: Tokenizer, random: np.random.Generator) -> list[str]:
    """Tokens that are a word after a space; where there are none, any that are a printable text."""
    ids = random.permutation(tokenizer.vocab_size)[: 8 * MAX_WORDS].tolist()
    pieces = list(dict.fromkeys(tokenizer.piece(id) for id in ids if id not in tokenizer.special_ids))
    apart = [piece for piece in pieces if piece[:1] == " " and piece[1:].isalpha()]
    printable = [piece for piece in pieces if piece.isprintable() and piece.strip() == piece != ""]
    for candidates in (apart, printable):
        words = list(itertools.islice((word for word in candidates if _is_one_token(tokenizer, word)), MAX_WORDS))
        if words:
            return words
    raise ConfigError("The tokenizer has no token that is a word of its own, of which random prompts could be made.")


def _is_one_token(tokenizer: Tokenizer, word: str) -> bool:
    once, thrice = (len(tokenizer.encode(word * times)) for times in (1, 3))
    return thrice == once + 2
