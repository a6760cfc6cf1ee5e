"""Answers as bytes, without holding up everybody else where one is large."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from hex_llm.completion import Answer

_MANY = 5_000  # numbers and names; about ten milliseconds


async def render(answers: Sequence[Answer], make: Callable[[], dict[str, Any]]) -> bytes:
    """The JSON of what `make` makes of answers. Log-probabilities can make it millions of numbers: in a thread then."""
    if sum(map(_size, answers)) < _MANY:
        return orjson.dumps(make())
    return await asyncio.to_thread(lambda: orjson.dumps(make()))


def _size(answer: Answer) -> int:
    sampling = answer.request.sampling
    size = len(answer.completion.token_ids) * (0 if sampling.logprobs is None else 1 + sampling.logprobs)
    if answer.prompt_logprobs is not None and sampling.prompt_logprobs is not None:
        size += len(answer.prompt_logprobs) * (1 + sampling.prompt_logprobs)
    return size
