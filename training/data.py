"""The small world: unlimited training documents from a seed, and the held-out questions they never contain.

`python -m training.data --out FOLDER` writes the held-out questions and prints some training documents.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training import arithmetic, conversation, knowledge, language, stories
from training.exchange import Exchange, Kind, is_held_out
from training.tokenizer import BEGIN, END_OF_TEXT, render

HELD_OUT_SEED = 20
HELD_OUT_PER_KIND = 40

KINDS: dict[str, tuple[Kind, float]] = {
    "add": (arithmetic.add, 9),
    "subtract": (arithmetic.subtract, 10),
    "multiply": (arithmetic.multiply, 3),
    "divide": (arithmetic.divide, 2),
    "too_large": (arithmetic.too_large, 2),
    "word_problem": (arithmetic.word_problem, 3),
    "count": (arithmetic.count, 3),
    "count_down": (arithmetic.count_down, 2),
    "count_by": (arithmetic.count_by, 3),
    "compare": (arithmetic.compare, 3),
    "sort": (arithmetic.sort_numbers, 4),
    "parity": (arithmetic.parity, 1),
    "next_number": (arithmetic.next_number, 1),
    "numerals": (arithmetic.numerals, 2),
    "list_length": (arithmetic.list_length, 2),
    "capital": (knowledge.capital, 9),
    "capital_follow_up": (knowledge.capital_follow_up, 2),
    "country": (knowledge.country, 4),
    "where": (knowledge.where, 4),
    "colour": (knowledge.colour, 3),
    "day": (knowledge.day, 3),
    "month": (knowledge.month, 4),
    "animal": (knowledge.animal, 3),
    "trivia": (knowledge.trivia, 2),
    "repeat": (language.repeat, 6),
    "repeat_times": (language.repeat_times, 3),
    "spelling": (language.spelling, 7),
    "upper_case": (language.upper_case, 2),
    "opposite": (language.opposite, 3),
    "plural": (language.plural, 2),
    "name_some": (language.name_some, 1),
    "json_object": (language.json_object, 4),
    "json_array": (language.json_array, 2),
    "greeting": (conversation.greeting, 2),
    "identity": (conversation.identity, 2),
    "persona": (conversation.persona, 1),
    "system_fact": (conversation.system_fact, 1),
    "remember": (conversation.remember, 5),
    "last_question": (conversation.last_question, 1),
    "unknown": (conversation.unknown, 6),
    "joke": (conversation.joke, 0.5),
    "story": (stories.story, 5),
    "poem": (stories.poem, 0.5),
}

_NAMES = list(KINDS)
_WEIGHTS = [weight for _, weight in KINDS.values()]
_WITH_OWN_HISTORY = {"persona", "system_fact", "remember"}
_CHAT_NAMES = [name for name in _NAMES if name not in _WITH_OWN_HISTORY]
_CHAT_WEIGHTS = [KINDS[name][1] for name in _CHAT_NAMES]
_PROSE_NAMES = ["story", "story", "story", "capital", "country", "colour", "day", "month", "animal", "count", "add",
                "subtract", "opposite", "poem", "where"]  # fmt: skip


def draw(rng: random.Random, name: str) -> Exchange:
    """An exchange of this kind that training may show."""
    make = KINDS[name][0]
    while True:
        exchange = make(rng)
        if not is_held_out(name, exchange.key):
            return exchange


def _messages(system: str | None, turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def _some_system(rng: random.Random, share: float) -> str | None:
    return rng.choice(conversation.SYSTEMS) if rng.random() < share else None


def _single(rng: random.Random) -> str:
    exchange = draw(rng, rng.choices(_NAMES, _WEIGHTS)[0])
    return render(_messages(exchange.system or _some_system(rng, 0.12), list(exchange.turns)))


def _recalls(rng: random.Random, most: int) -> list[conversation.Recall]:
    topics = rng.sample(conversation.TOPICS, rng.randint(0, min(most, len(conversation.TOPICS))))
    recalls = [conversation.recall(rng, topic) for topic in topics]
    return [item for item in recalls if not is_held_out("remember", item.key)]


def chat(rng: random.Random, exchanges: int) -> str:
    """A conversation over many subjects in which some things are told early and asked back later."""
    steps = [list(draw(rng, name).turns) for name in rng.choices(_CHAT_NAMES, _CHAT_WEIGHTS, k=exchanges)]
    for item in _recalls(rng, most=1 + exchanges // 2):
        told = rng.randint(0, len(steps))
        steps.insert(told, [item.tell])
        asked = rng.randint(told + 1, len(steps))
        steps.insert(asked, [item.ask])
        if rng.random() < 0.1 and not is_held_out("remember", item.untold_key):
            steps.insert(rng.randint(0, told), [(item.ask[0], item.untold)])
    return render(_messages(_some_system(rng, 0.2), [turn for step in steps for turn in step]))


def _prose(rng: random.Random) -> str:
    """Plain text without chat roles, so that bare prompts are continued sensibly."""
    answers = [draw(rng, name).turns[-1][1] for name in rng.choices(_PROSE_NAMES, k=rng.choice([1, 1, 2, 3]))]
    return BEGIN + " ".join(answers) + END_OF_TEXT


def document(rng: random.Random) -> str:
    """One training document of everyday length."""
    roll = rng.random()
    if roll < 0.70:
        return _single(rng)
    if roll < 0.94:
        return chat(rng, exchanges=rng.randint(1, 5))
    return _prose(rng)


def long_document(rng: random.Random) -> str:
    """One conversation that is likely to fill the whole context."""
    return chat(rng, exchanges=rng.choice([15, 30, 60]))


def held_out() -> Iterator[dict[str, Any]]:
    """Questions whose combination never occurs in training, at most so many of each kind, each once."""
    for name in _NAMES:
        rng, seen = random.Random(f"{HELD_OUT_SEED}{name}"), set[str]()
        for _ in range(40_000):
            exchange = KINDS[name][0](rng)
            if not is_held_out(name, exchange.key) or exchange.key in seen:
                continue
            seen.add(exchange.key)
            yield _question(name, exchange)
            if len(seen) == HELD_OUT_PER_KIND:
                break


def _question(name: str, exchange: Exchange) -> dict[str, Any]:
    messages = _messages(exchange.system, list(exchange.turns))
    question: dict[str, Any] = {"kind": name, "messages": messages[:-1]}
    if exchange.contains:
        return question | {"contains": list(exchange.contains)}
    return question | {"answer": messages[-1]["content"]}


def write_held_out(path: Path) -> list[dict[str, Any]]:
    """The held-out questions, also written as one JSON object per line."""
    questions = list(held_out())
    path.write_text("".join(json.dumps(question, ensure_ascii=False) + "\n" for question in questions), "utf-8")
    return questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for held_out.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="seed of the documents shown")
    parser.add_argument("--show", type=int, default=20, help="training documents to print")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    questions = write_held_out(arguments.out / "held_out.jsonl")
    rng = random.Random(arguments.seed)
    for _ in range(arguments.show):
        print(document(rng))
    print(f"{len(questions)} held-out questions of {len({q['kind'] for q in questions})} kinds")


if __name__ == "__main__":
    main()
