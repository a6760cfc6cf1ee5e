"""Exchanges about numbers: sums, counting, comparing, sorting, numbers in words."""

import random

from training.exchange import Exchange, capitalized, phrase, vary
from training.words import ANIMALS, FRUITS, NAMES, OBJECTS, number_in_words

LARGEST = 99
LARGEST_FACTOR = 12

_ASK = [
    "What is {sum}?", "{sum}", "{sum} =", "{sum} = ?", "Calculate {sum}.", "How much is {sum}?", "Compute {sum}.",
    "What's {sum}?", "Can you work out {sum}?", "Solve {sum}.", "Tell me what {sum} is.", "What does {sum} equal?",
    "Evaluate {sum}.", "What is the result of {sum}?",
]  # fmt: skip
_ADD_WORDS = [
    "What is {a} plus {b}?", "Add {a} and {b}.", "What is the sum of {a} and {b}?", "How much is {a} plus {b}?",
    "{a} plus {b}", "Add {b} to {a}.",
]  # fmt: skip
_SUBTRACT_WORDS = [
    "What is {a} minus {b}?", "Subtract {b} from {a}.", "How much is {a} minus {b}?", "{a} minus {b}",
    "Take {b} away from {a}.", "What is {a} take away {b}?",
]  # fmt: skip
_MULTIPLY_WORDS = [
    "What is {a} times {b}?", "Multiply {a} by {b}.", "What is the product of {a} and {b}?", "{a} times {b}",
    "What is {a} multiplied by {b}?", "How much is {a} times {b}?", "Multiply {a} and {b}.",
]  # fmt: skip
_DIVIDE_WORDS = [
    "What is {a} divided by {b}?", "Divide {a} by {b}.", "How much is {a} divided by {b}?", "{a} divided by {b}",
]  # fmt: skip


def _ask(rng: random.Random, a: int, b: int, signs: list[str], worded: list[str]) -> tuple[str, str]:
    """The question and a name of its phrasing that stays the same when final punctuation is left out."""
    if rng.random() < 0.4:
        index, question = phrase(rng, worded, a=a, b=b)
        return vary(rng, question), worded[index].rstrip("?. ")
    sign = rng.choice(signs)
    space = "" if rng.random() < 0.25 else " "
    index, question = phrase(rng, _ASK, sum=f"{a}{space}{sign}{space}{b}")
    return vary(rng, question), _ASK[index].rstrip("?. ")


def _operand(rng: random.Random) -> int:
    return rng.randint(0, 20) if rng.random() < 0.15 else rng.randint(0, LARGEST)


def add(rng: random.Random) -> Exchange:
    a, b = _operand(rng), _operand(rng)
    question, _ = _ask(rng, a, b, ["+"], _ADD_WORDS)
    return Exchange(((question, f"{a} + {b} = {a + b}."),), key=f"{min(a, b)}+{max(a, b)}")


def subtract(rng: random.Random) -> Exchange:
    a, b = _operand(rng), _operand(rng)
    if a < b and rng.random() < 0.6:
        a, b = b, a
    question, _ = _ask(rng, a, b, ["-"], _SUBTRACT_WORDS)
    return Exchange(((question, f"{a} - {b} = {a - b}."),), key=f"{a}-{b}")


def multiply(rng: random.Random) -> Exchange:
    a, b = rng.randint(0, LARGEST_FACTOR), rng.randint(0, LARGEST_FACTOR)
    question, how = _ask(rng, a, b, ["*", "x", "×"], _MULTIPLY_WORDS)
    return Exchange(((question, f"{a} * {b} = {a * b}."),), key=f"{how}|{a}*{b}")


def divide(rng: random.Random) -> Exchange:
    b, quotient = rng.randint(1, LARGEST_FACTOR), rng.randint(0, LARGEST_FACTOR)
    question, how = _ask(rng, b * quotient, b, ["/", "÷", ":"], _DIVIDE_WORDS)
    return Exchange(((question, f"{b * quotient} / {b} = {quotient}."),), key=f"{how}|{b * quotient}/{b}")


def too_large(rng: random.Random) -> Exchange:
    """Sums beyond the small world get an honest answer."""
    if rng.random() < 0.6:
        a, b = rng.randint(100, 10 ** rng.randint(3, 6)), rng.randint(1, 10 ** rng.randint(1, 6))
        if rng.random() < 0.4:
            a, b = b, a
        sign, worded = rng.choice([("+", _ADD_WORDS), ("-", _SUBTRACT_WORDS)])
        question, _ = _ask(rng, a, b, [sign], worded)
        return Exchange(((question, f"I can only add and subtract numbers up to {LARGEST}."),), key=f"{a}{sign}{b}")
    a, b = rng.randint(LARGEST_FACTOR + 1, 10 ** rng.randint(2, 4)), rng.randint(2, 10 ** rng.randint(1, 4))
    if rng.random() < 0.5:
        a, b = b, a
    question, _ = _ask(rng, a, b, ["*", "x", "×"], _MULTIPLY_WORDS)
    return Exchange(((question, f"I can only multiply numbers up to {LARGEST_FACTOR}."),), key=f"{a}*{b}")


_GAINS = [
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have?",
    "{name} has {a} {things}. {name} finds {b} more {things}. How many {things} does {name} have now?",
    "If {name} has {a} {things} and buys {b} more, how many {things} does {name} have?",
]
_LOSSES = [
    "{name} has {a} {things} and gives away {b}. How many {things} does {name} have left?",
    "{name} has {a} {things}. {name} loses {b} {things}. How many {things} does {name} have now?",
    "If {name} has {a} {things} and sells {b} of them, how many {things} does {name} have left?",
]


def word_problem(rng: random.Random) -> Exchange:
    thing = rng.choice([noun for noun in OBJECTS + FRUITS if not noun.endswith(("x", "y", "h"))])
    name, things = rng.choice(NAMES), f"{thing}s"
    a, b = sorted((rng.randint(1, LARGEST), rng.randint(1, LARGEST)), reverse=True)
    gains = rng.random() < 0.5
    _, question = phrase(rng, _GAINS if gains else _LOSSES, name=name, a=a, b=b, things=things)
    total, sign = (a + b, "+") if gains else (a - b, "-")
    answer = f"{a} {sign} {b} = {total}. {name} has {total} {thing if total == 1 else things}."
    return Exchange(((question, answer),), key=f"{b}+{a}" if gains else f"{a}-{b}")


_COUNT = [
    "Count from {a} to {b}.", "Can you count from {a} to {b}?", "Count up from {a} to {b}.",
    "List the numbers from {a} to {b}.", "Write the numbers from {a} to {b}.",
]  # fmt: skip
_COUNT_DOWN = ["Count from {a} to {b}.", "Count down from {a} to {b}.", "Count backwards from {a} to {b}."]
_COUNT_BY = [
    "Count from {a} to {b} by {step}.", "Count by {step} from {a} to {b}.",
    "Count from {a} to {b} in steps of {step}.",
]  # fmt: skip
_STEP_WORDS = {2: "twos", 3: "threes", 5: "fives", 10: "tens"}


def count(rng: random.Random) -> Exchange:
    start = 1 if rng.random() < 0.25 else rng.randint(0, 80)
    end = start + (rng.randint(15, 100) if rng.random() < 0.1 else rng.randint(1, 14))
    end = min(end, 100)
    if start == 1 and rng.random() < 0.3:
        _, question = phrase(rng, ["Count to {b}.", "Can you count to {b}?", "Count up to {b}."], b=end)
    else:
        _, question = phrase(rng, _COUNT, a=start, b=end)
    answer = ", ".join(str(n) for n in range(start, end + 1)) + "."
    return Exchange(((vary(rng, question), answer),), key=f"{start}-{end}")


def count_down(rng: random.Random) -> Exchange:
    end = rng.choice([0, 1]) if rng.random() < 0.3 else rng.randint(0, 80)
    start = min(end + rng.randint(1, 20), 100)
    _, question = phrase(rng, _COUNT_DOWN, a=start, b=end)
    answer = ", ".join(str(n) for n in range(start, end - 1, -1)) + "."
    return Exchange(((vary(rng, question), answer),), key=f"{start}-{end}")


def count_by(rng: random.Random) -> Exchange:
    step = rng.choice(list(_STEP_WORDS))
    start = 0 if rng.random() < 0.3 else rng.randint(0, 50)
    end = min(start + step * rng.randint(2, 10), 100)
    end = start + (end - start) // step * step
    word = str(step) if rng.random() < 0.4 else _STEP_WORDS[step]
    _, question = phrase(rng, _COUNT_BY, a=start, b=end, step=word)
    answer = ", ".join(str(n) for n in range(start, end + 1, step)) + "."
    return Exchange(((vary(rng, question), answer),), key=f"{start}-{end}-{step}")


_BIGGER = [
    "Which is bigger, {a} or {b}?", "Which number is bigger, {a} or {b}?", "What is bigger: {a} or {b}?",
    "Which is larger, {a} or {b}?", "Which number is greater, {a} or {b}?", "Is {a} or {b} bigger?",
]  # fmt: skip
_SMALLER = [
    "Which is smaller, {a} or {b}?", "Which number is smaller, {a} or {b}?", "What is smaller: {a} or {b}?",
    "Which number is less, {a} or {b}?", "Is {a} or {b} smaller?",
]  # fmt: skip


def compare(rng: random.Random) -> Exchange:
    a, b = rng.sample(range(101), 2)
    low, high = min(a, b), max(a, b)
    if rng.random() < 0.2:
        word, holds = rng.choice([("bigger", a > b), ("smaller", a < b)])
        answer = f"{'Yes' if holds else 'No'}, {a} is {'bigger' if a > b else 'smaller'} than {b}."
        return Exchange(((vary(rng, f"Is {a} {word} than {b}?"), answer),), key=f"{low},{high}")
    bigger = rng.random() < 0.5
    _, question = phrase(rng, _BIGGER if bigger else _SMALLER, a=a, b=b)
    answer = f"{high} is bigger than {low}." if bigger else f"{low} is smaller than {high}."
    return Exchange(((vary(rng, question), answer),), key=f"{low},{high}")


_SORT_UP = ["Sort {numbers}.", "Sort these numbers: {numbers}.", "Put {numbers} in order.", "Order {numbers}."]
_SORT_DOWN = ["Sort {numbers} from big to small.", "Sort {numbers} in descending order."]


def sort_numbers(rng: random.Random) -> Exchange:
    numbers = rng.sample(range(100), rng.randint(3, 5))
    down = rng.random() < 0.25
    _, question = phrase(rng, _SORT_DOWN if down else _SORT_UP, numbers=", ".join(map(str, numbers)))
    answer = ", ".join(map(str, sorted(numbers, reverse=down))) + "."
    return Exchange(((vary(rng, question), answer),), key=f"{down}{sorted(numbers)}")


def parity(rng: random.Random) -> Exchange:
    number = rng.randint(0, 200)
    index, question = phrase(
        rng, ["Is {n} even or odd?", "Is {n} odd or even?", "Is the number {n} even or odd?"], n=number
    )
    answer = f"{number} is {'odd' if number % 2 else 'even'}."
    return Exchange(((vary(rng, question), answer),), key=f"{index}|{number}")


def next_number(rng: random.Random) -> Exchange:
    number = rng.randint(1, 99)
    after = rng.random() < 0.5
    word, other = ("after", number + 1) if after else ("before", number - 1)
    index, question = phrase(
        rng, ["What number comes {word} {n}?", "Which number comes {word} {n}?", "What comes {word} {n}?"],
        word=word, n=number,
    )  # fmt: skip
    return Exchange(((vary(rng, question), f"{other} comes {word} {number}."),), key=f"{index}{word}{number}")


_IN_WORDS = ["Write {n} in words.", "How do you write {n} in words?", "Spell the number {n}.", "What is {n} in words?"]
_IN_DIGITS = ["Write {words} in digits.", "Write {words} as a number.", "What is {words} in digits?"]


def numerals(rng: random.Random) -> Exchange:
    number = rng.randint(0, 100)
    words = number_in_words(number)
    if rng.random() < 0.6:
        index, question = phrase(rng, _IN_WORDS, n=number)
        return Exchange(((vary(rng, question), f"{capitalized(words)}."),), key=f"w{index}|{number}")
    index, question = phrase(rng, _IN_DIGITS, words=words)
    return Exchange(((vary(rng, question), f"{number}."),), key=f"d{index}|{number}")


_HOW_MANY = [
    "How many animals are in this list: {items}?", "How many words are in this list: {items}?",
    "Count the words: {items}.",
]  # fmt: skip


def list_length(rng: random.Random) -> Exchange:
    items = rng.sample(ANIMALS, rng.randint(1, 7))
    index, question = phrase(rng, _HOW_MANY, items=", ".join(items))
    noun = ("animal" if index == 0 else "word") + ("" if len(items) == 1 else "s")
    return Exchange(((question, f"The list has {len(items)} {noun}."),), key=",".join(items))
