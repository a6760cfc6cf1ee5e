"""Exchanges about facts: capitals, continents, colours, the calendar, animals, trivia."""

import random

from training.exchange import Exchange, capitalized, is_held_out, phrase, vary
from training.places import ALIASES, COUNTRIES, STATES
from training.words import (
    BABIES,
    COLOUR_OF,
    DAYS,
    LEGS,
    MONTH_LENGTHS,
    MONTHS,
    ORDINALS,
    SOUNDS,
    TRIVIA,
    pairs,
    with_article,
)

_CAPITAL = [
    "What is the capital of {place}?", "What's the capital of {place}?", "Name the capital of {place}.",
    "Which city is the capital of {place}?", "Tell me the capital of {place}.", "Capital of {place}?",
    "What is {place}'s capital?", "What is the capital city of {place}?", "Do you know the capital of {place}?",
    "Can you tell me the capital of {place}?", "What city is the capital of {place}?", "the capital of {place}",
    "I would like to know the capital of {place}.", "{place} has which capital?", "Give me the capital of {place}.",
    "Can you tell me what the capital of {place} is?",
]  # fmt: skip
_COUNTRY_OF = [
    "Which country has {city} as its capital?", "{city} is the capital of which country?",
    "What country is {city} the capital of?", "Of which country is {city} the capital?",
    "What is {city} the capital of?", "{city} is the capital of what?",
    "Which country's capital is {city}?",
]  # fmt: skip
_WHERE = ["Where is {city}?", "In which country is {city}?", "What country is {city} in?", "Where can I find {city}?"]
_CONTINENT = [
    "Which continent is {place} in?", "On which continent is {place}?", "What continent is {place} on?",
    "Where is {place}?", "In which part of the world is {place}?",
]  # fmt: skip
_FOLLOW_UP = ["And of {place}?", "And {place}?", "What about {place}?", "And what about {place}?", "How about {place}?"]


def _asked_as(rng: random.Random, place: str) -> str:
    aliases = ALIASES.get(place, [])
    if aliases and rng.random() < 0.6:
        return rng.choice(aliases)
    if place.startswith("the ") and rng.random() < 0.15:
        return place[4:]
    return place


def _sentence(place: str, capital: str) -> str:
    return f"The capital of {place} is {capital}" + ("" if capital.endswith(".") else ".")


def _any_place(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.12:
        return rng.choice(STATES)
    return rng.choice(COUNTRIES)[:2]


def capital(rng: random.Random) -> Exchange:
    place, city = _any_place(rng)
    asked = _asked_as(rng, place)
    index, question = phrase(rng, _CAPITAL, place=asked)
    return Exchange(((vary(rng, capitalized(question)), _sentence(place, city)),), key=f"{index}|{asked}")


def capital_follow_up(rng: random.Random) -> Exchange:
    opening = capital(rng)
    while is_held_out("capital", opening.key):
        opening = capital(rng)
    place, city = _any_place(rng)
    _, follow_up = phrase(rng, _FOLLOW_UP, place=place)
    return Exchange((*opening.turns, (vary(rng, follow_up), _sentence(place, city))), key=f"{opening.key}|{place}")


def country(rng: random.Random) -> Exchange:
    place, city, _ = rng.choice(COUNTRIES)
    index, question = phrase(rng, _COUNTRY_OF, city=city)
    return Exchange(((vary(rng, question), f"{city} is the capital of {place}."),), key=f"{index}|{city}")


def where(rng: random.Random) -> Exchange:
    place, city, continent = rng.choice(COUNTRIES)
    if rng.random() < 0.4 and city not in place:
        index, question = phrase(rng, _WHERE, city=city)
        return Exchange(((vary(rng, question), f"{city} is in {place}."),), key=f"{index}|{city}")
    index, question = phrase(rng, _CONTINENT, place=place)
    verb = "are" if place.startswith("the ") and place.endswith("s") else "is"
    if place == "the United States":
        verb = "is"
    question = question.replace("is the", f"{verb} the")
    answer = f"{capitalized(place)} {verb} in {continent}."
    return Exchange(((vary(rng, question), answer),), key=f"c{index}|{place}")


_COLOUR = [
    "What colour is {thing}?", "What color is {thing}?", "Which colour is {thing}?", "Which color is {thing}?",
    "What is the colour of {thing}?", "What is the color of {thing}?", "Tell me the colour of {thing}.",
    "Do you know what color {thing} is?", "What colour does {thing} have?", "Tell me what colour {thing} is.",
]  # fmt: skip


def colour(rng: random.Random) -> Exchange:
    thing = rng.choice(list(COLOUR_OF))
    index, question = phrase(rng, _COLOUR, thing=thing)
    return Exchange(((vary(rng, question), f"{capitalized(thing)} is {COLOUR_OF[thing]}."),), key=f"{index}|{thing}")


_NEIGHBOUR = [
    "What {unit} comes {word} {name}?", "Which {unit} comes {word} {name}?", "Which {unit} is {word} {name}?",
    "What {unit} is {word} {name}?", "What is the {unit} {word} {name}?", "Tell me the {unit} {word} {name}.",
    "What comes {word} {name}?", "Name the {unit} {word} {name}.",
]  # fmt: skip


def _neighbour(rng: random.Random, unit: str, names: list[str]) -> Exchange:
    position, after = rng.randrange(len(names)), rng.random() < 0.55
    word, shift = ("after", 1) if after else ("before", -1)
    name, other = names[position], names[(position + shift) % len(names)]
    index, question = phrase(rng, _NEIGHBOUR, unit=unit, word=word, name=name)
    return Exchange(((vary(rng, question), f"{other} comes {word} {name}."),), key=f"{index}{word}|{name}")


_DAYS_AHEAD = [
    "If today is {name}, what day is it in {n} days?", "Today is {name}. What day will it be in {n} days?",
    "What day is {n} days after {name}?",
]  # fmt: skip
_TOMORROW = ["If today is {name}, what day is tomorrow?", "Today is {name}. What day is tomorrow?"]
_YESTERDAY = ["If today is {name}, what day was yesterday?", "Today is {name}. What day was yesterday?"]


def day(rng: random.Random) -> Exchange:
    roll, position = rng.random(), rng.randrange(7)
    name = DAYS[position]
    if roll < 0.5:
        return _neighbour(rng, "day", DAYS)
    if roll < 0.65:
        index, question = phrase(rng, _TOMORROW, name=name)
        answer, key = f"Tomorrow is {DAYS[(position + 1) % 7]}.", f"tomorrow{index}|{name}"
    elif roll < 0.8:
        index, question = phrase(rng, _YESTERDAY, name=name)
        answer, key = f"Yesterday was {DAYS[(position - 1) % 7]}.", f"yesterday{index}|{name}"
    else:
        ahead = rng.randint(2, 7)
        index, question = phrase(rng, _DAYS_AHEAD, name=name, n=ahead)
        answer = f"{ahead} days after {name} is {DAYS[(position + ahead) % 7]}."
        key = f"{index}+{ahead}|{name}"
    return Exchange(((vary(rng, question), answer),), key=key)


_LENGTH = ["How many days are in {name}?", "How many days does {name} have?", "How long is {name}?"]
_NTH = [
    "What is the {nth} month of the year?", "Which month is the {nth} month?", "What is the {nth} month?",
    "Name the {nth} month of the year.",
]  # fmt: skip


def month(rng: random.Random) -> Exchange:
    roll, position = rng.random(), rng.randrange(12)
    name = MONTHS[position]
    if roll < 0.5:
        return _neighbour(rng, "month", MONTHS)
    if roll < 0.75:
        index, question = phrase(rng, _LENGTH, name=name)
        answer, key = f"{name} has {MONTH_LENGTHS[position]} days.", f"length{index}|{name}"
    else:
        index, question = phrase(rng, _NTH, nth=ORDINALS[position])
        answer, key = f"{name} is the {ORDINALS[position]} month of the year.", f"nth{index}|{name}"
    return Exchange(((vary(rng, question), answer),), key=key)


_SOUND = [
    "What sound does {animal} make?", "What does {animal} say?", "Which sound does {animal} make?",
    "What noise does {animal} make?",
]  # fmt: skip
_BABY = [
    "What is a baby {animal} called?", "What do you call a baby {animal}?", "What is the name for a baby {animal}?",
    "What is a young {animal} called?",
]  # fmt: skip
_LEG = [
    "How many legs does {animal} have?", "How many legs has {animal}?", "What number of legs does {animal} have?",
    "Tell me how many legs {animal} has.",
]  # fmt: skip


def animal(rng: random.Random) -> Exchange:
    roll = rng.random()
    if roll < 0.33:
        name, sound = rng.choice(pairs(SOUNDS))
        index, question = phrase(rng, _SOUND, animal=with_article(name))
        answer, key = f"{capitalized(with_article(name))} says {sound}.", f"sound{index}|{name}"
    elif roll < 0.66:
        name, young = rng.choice(pairs(BABIES))
        index, question = phrase(rng, _BABY, animal=name)
        answer, key = f"A baby {name} is called {with_article(young)}.", f"baby{index}|{name}"
    else:
        name, legs = rng.choice(pairs(LEGS))
        index, question = phrase(rng, _LEG, animal=with_article(name))
        answer, key = f"{capitalized(with_article(name))} has {legs} legs.", f"legs{index}|{name}"
    return Exchange(((vary(rng, question), answer),), key=key)


def trivia(rng: random.Random) -> Exchange:
    questions, answer = rng.choice(TRIVIA)
    return Exchange(((vary(rng, rng.choice(questions)), answer),))
