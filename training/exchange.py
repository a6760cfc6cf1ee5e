"""One exchange between a user and the model, and the rule that keeps some of them out of training."""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training.words import listed

HELD_OUT_ONE_IN = 20
"""One combination in this many is asked only in the held-out set."""


@dataclass(frozen=True)
class Exchange:
    """Turns of (user, assistant), the last answer being the one that counts.

    `key` names the combination that is held out or trained, apart from letter case and courtesy; an empty key
    is never held out. `contains` replaces the exact answer where many answers are right.
    """

    turns: tuple[tuple[str, str], ...]
    key: str = ""
    system: str | None = None
    contains: tuple[str, ...] = ()


Kind = Callable[[random.Random], Exchange]


_SHARED = {"subtract": "add", "word_problem": "add", "last_question": "repeat"}
"""Kinds that say the same things: a sum kept out of one is kept out of the other."""


def is_held_out(kind: str, key: str) -> bool:
    """Whether training must never show this combination; depends on nothing but the two names."""
    if not key:
        return False
    digest = hashlib.blake2b(f"{_SHARED.get(kind, kind)}|{key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) % HELD_OUT_ONE_IN == 0


def phrase(rng: random.Random, templates: Sequence[str], **values: object) -> tuple[int, str]:
    """One of the templates with the values filled in, and its index for the key."""
    index = rng.randrange(len(templates))
    return index, templates[index].format(**values)


def capitalized(text: str) -> str:
    """The text with a capital first letter, the rest unchanged."""
    return text[:1].upper() + text[1:]


_OPENERS = ["Please tell me: ", "Hey, ", "Hi! ", "Hello! ", "OK, ", "Quick question: ", "Now, ", "So, "]


def vary(rng: random.Random, question: str, keep_case: bool = False) -> str:
    """The question as different people would type it: case, final punctuation, courtesy."""
    roll = rng.random()
    if roll < 0.16:
        question = question.rstrip("?.!") if len(question) > 1 else question
    elif roll < 0.20:
        question = question.rstrip(".?") + " please" + question[-1:] * (question[-1:] in ".?")
    elif roll < 0.25:
        opener = rng.choice(_OPENERS)
        question = opener + (question if keep_case else question[:1].lower() + question[1:])
    if not keep_case and rng.random() < 0.2:
        question = question.lower()
    return question


_SYLLABLES = listed("""ba be bi bo bu da de do du fa fi fo ga go gu ka ke ki ko la le li lo lu ma me mi mo na ne no nu
pa pe pi po ra re ri ro ru sa se si so ta te ti to va ve vi vo wa we za ze zi zo sha cho tri
bran plo stin mor vel qua xi yor jen hul""")


def invented_word(rng: random.Random) -> str:
    """A pronounceable word that means nothing, so that copying has to be learned and not remembered."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4)))
