"""Where the prompts of a benchmark come from."""

import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hex_llm.bench.prompt import Prompt
from hex_llm.bench.random_text import RandomText
from hex_llm.errors import ConfigError
from hex_llm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Ids that are ordinary tokens in every vocabulary we know of: after bytes and special tokens, before the end.
PLAIN_IDS = (300, 1000)

_SONNET_TASK = "Choose some of these lines and write a poem with them:\n"


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Tokens of random prompts: prefix, the same for all, and input make the prompt."""

    input: int
    output: int
    prefix: int
    range_ratio: float  # lengths are drawn evenly from length * (1 - ratio) to length * (1 + ratio)


def random_prompts(
    count: int, lengths: RandomLengths, tokenizer: Tokenizer | None, random: np.random.Generator
) -> list[Prompt]:
    """Prompts of exactly these lengths: texts where there is a tokenizer, token ids where there is none."""
    inputs = _draw(lengths.input, lengths.range_ratio, count, random)
    outputs = _draw(lengths.output, lengths.range_ratio, count, random)
    if tokenizer is None:
        prefix = random.integers(*PLAIN_IDS, lengths.prefix).tolist()
        return [
            Prompt((*prefix, *random.integers(*PLAIN_IDS, size).tolist()), lengths.prefix + size, output)
            for size, output in zip(inputs, outputs, strict=True)
        ]
    text = RandomText(tokenizer, random)
    start = text.words(lengths.prefix)
    sizes = [lengths.prefix + size for size in inputs]
    return [Prompt(text.of_tokens(size, start), size, output) for size, output in zip(sizes, outputs, strict=True)]


def _draw(length: int, ratio: float, count: int, random: np.random.Generator) -> list[int]:
    low, high = max(int(length * (1 - ratio)), 1), int(length * (1 + ratio))
    return random.integers(low, high, count, endpoint=True).tolist()


def sharegpt_prompts(
    path: Path, count: int, output_tokens: int | None, tokenizer: Tokenizer, random: np.random.Generator
) -> list[Prompt]:
    """First turns of ShareGPT's conversations, in random order; answers are as long as the second turns were."""
    conversations = _read_json(path)
    if not isinstance(conversations, list):
        raise ConfigError(f"--dataset_path={path} is not a list of conversations.")

    def usable() -> Iterator[Prompt]:
        for index in random.permutation(len(conversations)):
            if (turns := _turns(conversations[index])) is None:
                continue
            size = len(tokenizer.encode(turns[0]))
            output = output_tokens or len(tokenizer.encode(turns[1], add_special_tokens=False))
            # What others leave out as well: too short to be a question, too long for the models of its day.
            if 4 <= size <= 1024 and (output_tokens or output >= 4) and size + output <= 2048:
                yield Prompt(turns[0], size, output)

    return _take(usable(), count, path)


def _turns(conversation: Any) -> tuple[str, str] | None:
    turns = conversation.get("conversations", conversation.get("conversation")) if type(conversation) is dict else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    first, second = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
    return (first, second) if isinstance(first, str) and isinstance(second, str) else None


@dataclass(frozen=True, slots=True)
class SonnetLengths:
    """Tokens of prompts made of a poem's lines; the prefix is a part of the input."""

    input: int
    output: int
    prefix: int


def sonnet_prompts(
    path: Path, count: int, lengths: SonnetLengths, tokenizer: Tokenizer, random: np.random.Generator
) -> list[Prompt]:
    """A task and lines of a poem: the first ones, which are the same for all, then some at random, up to the length."""
    lines = [line + "\n" for line in _read_text(path).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--dataset_path={path} has no lines.")
    sizes = [len(tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    task_size = len(tokenizer.encode(_SONNET_TASK))
    if task_size + max(sizes) > lengths.input:
        raise ConfigError(
            f"--sonnet_input_len={lengths.input} is not enough for the task and a line, which are"
            f" {task_size + max(sizes)} tokens."
        )
    num_first = 0
    while num_first < len(lines) and task_size + sum(sizes[: num_first + 1]) <= lengths.prefix:
        num_first += 1
    return [_sonnet(lines, sizes, num_first, lengths, tokenizer, random) for _ in range(count)]


def _sonnet(
    lines: Sequence[str],
    sizes: Sequence[int],
    num_first: int,
    lengths: SonnetLengths,
    tokenizer: Tokenizer,
    random: np.random.Generator,
) -> Prompt:
    chosen = list(range(num_first))
    room = lengths.input - len(tokenizer.encode(_SONNET_TASK)) - sum(sizes[:num_first])
    while room >= sizes[line := int(random.integers(len(lines)))]:
        chosen.append(line)
        room -= sizes[line]
    while True:  # together the lines may be some tokens more than one by one
        text = _SONNET_TASK + "".join(lines[line] for line in chosen)
        size = len(tokenizer.encode(text))
        if size <= lengths.input or not chosen:
            return Prompt(text, size, lengths.output)
        chosen.pop()


def custom_prompts(path: Path, count: int, output_tokens: int, tokenizer: Tokenizer | None) -> list[Prompt]:
    """The lines of a JSONL file, in order: `prompt`, and `output_tokens` where it should not be the flag's."""

    def prompts() -> Iterator[Prompt]:
        for number, line in enumerate(_read_text(path).split("\n"), 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                raise ConfigError(f"--dataset_path={path}: line {number} is not JSON.") from None
            text = values.get("prompt") if isinstance(values, dict) else None
            if not isinstance(text, str) or not text:
                raise ConfigError(f"--dataset_path={path}: line {number} has no text as its prompt.")
            output = values.get("output_tokens", output_tokens)
            if type(output) is not int or output < 1:
                raise ConfigError(
                    f"--dataset_path={path}: line {number} has output_tokens {output!r}, not an integer of at least 1."
                )
            yield Prompt(text, len(tokenizer.encode(text)) if tokenizer else None, output)

    return _take(prompts(), count, path)


def _take(prompts: Iterator[Prompt], count: int, path: Path) -> list[Prompt]:
    """So many prompts, from the start again where there are fewer."""
    found = list(itertools.islice(prompts, count))
    if not found:
        raise ConfigError(f"--dataset_path={path} has no prompt that can be used.")
    if len(found) < count:
        logger.warning("%s has %d prompts that can be used; they repeat to make %d.", path, len(found), count)
    return [found[index % len(found)] for index in range(count)]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read_text(path))
    except (ValueError, RecursionError):
        raise ConfigError(f"--dataset_path={path} is not JSON.") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--dataset_path={path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--dataset_path={path} is not UTF-8 text.") from None
