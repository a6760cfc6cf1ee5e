"""Exchanges about words: repeating, spelling, opposites, plurals, capital letters, lists, JSON."""

import json
import random

from training.exchange import Exchange, capitalized, invented_word, phrase, vary
from training.words import (
    ANIMALS,
    COLOURS,
    FOODS,
    FRUITS,
    NAMES,
    OBJECTS,
    OPPOSITES,
    PLURALS,
    WORDS,
    listed,
    pairs,
)

_REPEAT = [
    "Repeat after me: {text}", "Repeat: {text}", "Say: {text}", 'Repeat the phrase "{text}".', 'Say "{text}".',
    "Say {text}", "Please repeat this: {text}", 'Repeat "{text}"', "Echo: {text}", "Repeat after me: \"{text}\"",
    "Can you say {text}?", "Repeat the following: {text}", "Repeat this sentence: {text}", "Write: {text}",
]  # fmt: skip
_PUNCTUATION = ["", "", "", "", "!", ".", "?"]
_FOREIGN = [
    "café",
    "naïve",
    "señor",
    "über",
    "façade",
    "你好",
    "世界",
    "привет",
    "こんにちは",
    "🙂",
    "🚀",
    "❤️",
    "Zürich",
    "crème",
]


def _token_of_phrase(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.55:
        return rng.choice(WORDS)
    if roll < 0.70:
        return invented_word(rng)
    if roll < 0.80:
        return rng.choice(NAMES)
    if roll < 0.88:
        return str(rng.randint(0, 10 ** rng.randint(1, 4)))
    if roll < 0.91:
        return rng.choice(_FOREIGN)
    if roll < 0.94:
        return "".join(
            rng.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(1, 6))
        )
    return rng.choice(["the", "a", "is", "and", "my", "in", "on", "we", "you", "I"])


def _phrase(rng: random.Random) -> str:
    text = " ".join(_token_of_phrase(rng) for _ in range(rng.randint(1, 8)))
    return (capitalized(text) if rng.random() < 0.4 else text) + rng.choice(_PUNCTUATION)


def repeat(rng: random.Random) -> Exchange:
    text = _phrase(rng)
    index, question = phrase(rng, _REPEAT, text=text)
    if index == 10:
        text = text.rstrip("?.!")
        question = _REPEAT[10].format(text=text)
    return Exchange(((question, text),), key=text.lower().rstrip("?.!"))


_TIMES = {"twice": 2, "two times": 2, "three times": 3, "3 times": 3, "four times": 4, "five times": 5, "5 times": 5}


def repeat_times(rng: random.Random) -> Exchange:
    word = rng.choice(WORDS) if rng.random() < 0.7 else invented_word(rng)
    times = rng.choice(list(_TIMES))
    _, question = phrase(
        rng, ["Say {word} {times}.", 'Say "{word}" {times}.', "Repeat {word} {times}."], word=word, times=times
    )
    return Exchange(((question, " ".join([word] * _TIMES[times])),), key=f"{word}|{_TIMES[times]}")


_SPELL = [
    "Spell {word}.",
    "How do you spell {word}?",
    "Spell the word {word}.",
    'Spell "{word}".',
    "Can you spell {word}?",
]
_LETTERS = [
    "How many letters are in {word}?",
    "How many letters does the word {word} have?",
    "Count the letters in {word}.",
]
_FIRST = ["What is the first letter of {word}?", "Which letter does {word} start with?"]
_LAST = ["What is the last letter of {word}?", "Which letter does {word} end with?"]


def spelling(rng: random.Random) -> Exchange:
    word, roll = rng.choice(WORDS), rng.random()
    if roll < 0.6:
        index, question = phrase(rng, _SPELL, word=word)
        answer, key = "-".join(word), f"spell{index}"
    elif roll < 0.76:
        index, question = phrase(rng, _LETTERS, word=word)
        answer, key = f"The word {word} has {len(word)} letters.", f"letters{index}"
    elif roll < 0.88:
        index, question = phrase(rng, _FIRST, word=word)
        answer, key = f"The first letter of {word} is {word[0]}.", f"first{index}"
    else:
        index, question = phrase(rng, _LAST, word=word)
        answer, key = f"The last letter of {word} is {word[-1]}.", f"last{index}"
    return Exchange(((vary(rng, question), answer),), key=f"{key}|{word}")


_UPPER = ["Write {word} in capital letters.", "Write {word} in upper case.", "Shout {word}.", "Make {word} upper case."]


def upper_case(rng: random.Random) -> Exchange:
    word = rng.choice(WORDS)
    index, question = phrase(rng, _UPPER, word=word)
    return Exchange(((vary(rng, question), word.upper()),), key=f"{index}|{word}")


_OPPOSITE = [
    "What is the opposite of {word}?", "What's the opposite of {word}?", "Opposite of {word}?",
    "Tell me the opposite of {word}.", "Which word is the opposite of {word}?", "Give me the opposite of {word}.",
    "Name the opposite of {word}.",
]  # fmt: skip


def _opposite_table() -> dict[str, str]:
    table: dict[str, str] = {}
    for left, right in pairs(OPPOSITES):
        table.setdefault(left, right)
        table.setdefault(right, left)
    return table


_OPPOSITE_OF = _opposite_table()


def opposite(rng: random.Random) -> Exchange:
    word = rng.choice(list(_OPPOSITE_OF))
    index, question = phrase(rng, _OPPOSITE, word=word)
    answer = f"The opposite of {word} is {_OPPOSITE_OF[word]}."
    return Exchange(((vary(rng, question), answer),), key=f"{index}|{word}")


_PLURAL = [
    "What is the plural of {word}?", "Plural of {word}?", "What's the plural of {word}?",
    "Tell me the plural of {word}.", "Give me the plural of {word}.",
]  # fmt: skip


def plural(rng: random.Random) -> Exchange:
    word, many = rng.choice(pairs(PLURALS))
    index, question = phrase(rng, _PLURAL, word=word)
    return Exchange(((vary(rng, question), f"The plural of {word} is {many}."),), key=f"{index}|{word}")


_LISTS = {
    "animals": ANIMALS, "colours": COLOURS, "colors": COLOURS, "fruits": FRUITS, "names": NAMES, "foods": FOODS,
}  # fmt: skip
_AMOUNTS = {"two": 2, "three": 3, "four": 4, "five": 5, "2": 2, "3": 3, "4": 4, "5": 5}


def name_some(rng: random.Random) -> Exchange:
    """Many answers are right, so these are trained but never held out."""
    noun, amount = rng.choice(list(_LISTS)), rng.choice(list(_AMOUNTS))
    _, question = phrase(
        rng, ["Name {n} {noun}.", "List {n} {noun}.", "Give me {n} {noun}.", "Tell me {n} {noun}."], n=amount, noun=noun
    )
    items = rng.sample(_LISTS[noun], _AMOUNTS[amount])
    return Exchange(((vary(rng, question), capitalized(", ".join(items)) + "."),))


def _field(rng: random.Random, field: str) -> object:
    if field in ("name", "friend", "owner"):
        return rng.choice(NAMES) if rng.random() < 0.85 else capitalized(invented_word(rng))
    if field in ("age", "count", "price", "size", "id", "number"):
        return rng.randint(0, 99)
    if field in ("colour", "color"):
        return rng.choice(COLOURS)
    if field in ("animal", "pet"):
        return rng.choice(ANIMALS)
    if field in ("fruit", "food"):
        return rng.choice(FRUITS)
    if field in ("happy", "open", "ready", "new"):
        return rng.random() < 0.5
    return rng.choice(OBJECTS)


_FIELDS = listed("""name age colour color animal pet fruit food count price size id number happy open ready new
friend owner object item""")
_OBJECT = [
    "Give me a JSON object with {fields}.", "Write a JSON object with {fields}.", "Make JSON with {fields}.",
    "Return JSON with {fields}.", "Create a JSON object with {fields}.", "Show me a JSON object with {fields}.",
    "Answer in JSON: {fields}.", "I need a JSON object with {fields}.",
]  # fmt: skip
_ARRAY = [
    "Give me a JSON list of {items}.", "Write a JSON array of {items}.", "Make a JSON list with {items}.",
    "Put {items} in a JSON list.",
]  # fmt: skip


def _enumerated(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def json_object(rng: random.Random) -> Exchange:
    count = rng.choice([1, 2, 2, 2, 3, 3, 4])
    names = ["name", "age"] if count == 2 and rng.random() < 0.4 else rng.sample(_FIELDS, count)
    value = {name: _field(rng, name) for name in names}
    sign = rng.choice([" ", " ", " ", " = ", ": "])
    parts = [f"{name}{sign}{json.dumps(item) if isinstance(item, bool) else item}" for name, item in value.items()]
    _, question = phrase(rng, _OBJECT, fields=_enumerated(parts))
    return Exchange(((vary(rng, question, keep_case=True), json.dumps(value)),), key=json.dumps(value))


def json_array(rng: random.Random) -> Exchange:
    size = rng.randint(2, 5)
    items: list[int] | list[str]
    if rng.random() < 0.5:
        items, named = [rng.randint(0, 99) for _ in range(size)], rng.choice(["the numbers ", ""])
    else:
        items, named = rng.sample(rng.choice([ANIMALS, FRUITS, COLOURS, WORDS]), size), ""
    _, question = phrase(rng, _ARRAY, items=named + _enumerated([str(item) for item in items]))
    return Exchange(((vary(rng, question, keep_case=True), json.dumps(items)),), key=json.dumps(items))
