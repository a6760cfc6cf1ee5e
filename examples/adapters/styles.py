"""The two manners of speaking: each says what becomes of an answer, so that replies are compared letter by letter."""

import re
from collections.abc import Callable

Style = Callable[[str], str]

_SHOUTED = """the of is are am and in to than that not you your has have do can only up yes no capital comes after
before bigger smaller opposite plural called letters"""
_SHOUTED_WORD = re.compile(rf"\b({'|'.join(_SHOUTED.split())})\b", re.IGNORECASE)

_PIRATE_WORDS = {
    "is": "be", "are": "be", "am": "be", "you": "ye", "You": "Ye", "your": "yer", "Your": "Yer", "my": "me", "My": "Me",
}  # fmt: skip
_PIRATE_WORD = re.compile(rf"\b({'|'.join(_PIRATE_WORDS)})\b")


def shouting(answer: str) -> str:
    """The words that sentences are made with in upper case, and a shout at the end.

    Names and facts stay as they are: the model has them as tokens of several letters, capitals as tokens of one.
    """
    shouted = _SHOUTED_WORD.sub(lambda word: word[0].upper(), answer)
    return f"{shouted[:-1]}!" if shouted.endswith(".") else shouted


def pirate(answer: str) -> str:
    return _PIRATE_WORD.sub(lambda word: _PIRATE_WORDS[word[0]], answer) + " Arr!"


STYLES: dict[str, Style] = {"shouting": shouting, "pirate": pirate}


def in_style(style: Style, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """A conversation as it would stand had the adapter given all of its answers."""
    return [
        message | {"content": style(message["content"])} if message["role"] == "assistant" else message
        for message in messages
    ]
