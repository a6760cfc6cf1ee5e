"""How many tokens a request used."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hex_llm.completion import Answer


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt's, found in the prefix cache

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def usage_of(answers: Iterable[Answer]) -> Usage:
    """A prompt counts once, however many answers it has."""
    prompt = completion = cached = 0
    for answer in answers:
        completion += len(answer.completion.token_ids)
        if answer.completion.index == 0:
            prompt += len(answer.request.prompt)
            cached += answer.num_cached
    return Usage(prompt, completion, cached)
