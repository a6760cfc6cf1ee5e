"""Answers as server-sent events: chunks of them as they come, and how a stream ends.

What a token costs here is paid for every token of every stream. So what chunks have in common is written once, and a
chunk that has nothing but text is three pieces put together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from hex_llm.completion import Answer
from hex_llm.engine.request import FinishReason
from hex_llm.errors import RequestError, ServerError
from hex_llm.server.errors_json import error_body
from hex_llm.server.usage import Usage, usage_of

DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """What the chunks of a route look like. `index` is that of a choice."""

    text_before: bytes  # what stands in a choice before its text, and after it
    text_after: bytes
    no_text: Mapping[str, Any]  # members of a choice that has no text
    wants_logprobs: bool
    wants_token_ids: bool

    def first(self, index: int, answer: Answer) -> dict[str, Any] | None:
        """The chunk that comes before the answer's text, as far as it is not like every chunk; None: there is none."""
        ...

    def text(self, text: str) -> Mapping[str, Any]:
        """The members of a choice that hold its text."""
        ...

    def logprobs(self, index: int, answer: Answer, start: int) -> dict[str, Any]:
        """Of the answer's tokens from `start` on."""
        ...


class _Choice:
    """How much of an answer has been told."""

    __slots__ = ("before_text", "begun", "ended", "index", "num_told")

    def __init__(self, index: int, before_text: bytes):
        self.index = index
        self.before_text = before_text
        self.num_told = 0  # tokens
        self.begun = False
        self.ended = False


class Stream:
    """The events of one request: `more` whenever an answer may have some, and then `last` or `error`.

    `head` is what all chunks begin with: id, object, created and model. Usage comes in every chunk (`continuous`), in
    a chunk of its own at the end (`include_usage` is true), or nowhere (it is false). None is for clients that know
    nothing of all this: the last chunk has usage, beside a choice like any other.
    """

    content_type = "text/event-stream"
    keep_alive = b": keep-alive\n\n"  # a comment, which clients pass over

    def __init__(
        self,
        shape: Shape,
        head: Mapping[str, Any],
        answers: Sequence[Answer],
        *,
        include_usage: bool | None,
        continuous: bool = False,
    ):
        self._shape = shape
        self._answers = answers
        self._include_usage = include_usage
        self._continuous = continuous
        self._head = head
        self._plain = not (shape.wants_logprobs or shape.wants_token_ids or continuous)
        self._left = len(answers)
        self._last: dict[str, Any] | None = None  # the choice that waits for its usage
        before = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        self._after_text = shape.text_after + (b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n")
        self._choices = [_Choice(index, before + b"%d," % index + shape.text_before) for index in range(len(answers))]

    def first(self) -> bytes:
        """What comes before any answer: nothing."""
        return b""

    def more(self, position: int, answer: Answer) -> bytes:
        """What an answer has gained since the last call, and its end where it has ended; often nothing."""
        choice = self._choices[position]
        if self._plain and choice.begun and not answer.finished:
            text = answer.read()
            return b"".join((choice.before_text, orjson.dumps(text), self._after_text)) if text else b""
        if choice.ended or not (answer.completion.token_ids or answer.finished):
            return b""
        parts = []
        if not choice.begun:
            choice.begun = True
            parts.append(self._opening(choice, answer))
        parts.append(self._told(choice, answer))
        if answer.finished:
            parts.append(self._ending(choice, answer))
        elif self._plain and not any(parts):
            # The first token, and it has no text yet: clients that time it should see it come.
            parts = [choice.before_text, b'""', self._after_text]
        return b"".join(parts)

    def last(self) -> bytes:
        """The end of a stream whose answers have all ended, and been told."""
        assert not self._left, "an answer has not been told to its end"
        if self._last is not None:
            usage = self._chunk([self._last], usage=usage_of(self._answers).as_json())
        elif self._include_usage:
            usage = self._chunk([], usage=usage_of(self._answers).as_json())
        else:
            usage = b""
        return usage + DONE

    def error(self, error: RequestError | ServerError) -> bytes:
        """The end of a stream that failed. Nothing says that it is done: what was sent is not all."""
        return b"data: " + error_body(error) + b"\n\n"

    def _opening(self, choice: _Choice, answer: Answer) -> bytes:
        chunk = self._shape.first(choice.index, answer)
        return b"" if chunk is None else self._chunk(**chunk, **self._usage_now(answer, 0))

    def _told(self, choice: _Choice, answer: Answer) -> bytes:
        """A chunk with text and what else was asked for. Tokens count even where their text is held back."""
        shape, start = self._shape, choice.num_told
        tokens = answer.completion.token_ids[start:]
        text = answer.read()
        if not text and not (tokens and (shape.wants_logprobs or shape.wants_token_ids)):
            return b""
        choice.num_told += len(tokens)
        content = {
            "index": choice.index,
            **shape.text(text),
            "logprobs": shape.logprobs(choice.index, answer, start) if shape.wants_logprobs else None,
            "finish_reason": None,
        }
        if shape.wants_token_ids:
            content["token_ids"] = tokens
        return self._chunk([content], **self._usage_now(answer, choice.num_told))

    def _ending(self, choice: _Choice, answer: Answer) -> bytes:
        """A chunk that says why the answer ended. It has no text: some clients read no text beside usage."""
        choice.ended = True
        self._left -= 1
        content = {
            "index": choice.index,
            **self._shape.no_text,
            "logprobs": None,
            **ending(answer),
        }
        if not self._left and self._include_usage is None:
            self._last = content
            return b""
        return self._chunk([content], **self._usage_now(answer, len(answer.completion.token_ids)))

    def _usage_now(self, answer: Answer, num_tokens: int) -> dict[str, Any]:
        if not self._include_usage:
            return {}
        # Of this answer alone: what the others came to is told with theirs.
        usage = Usage(len(answer.request.prompt), num_tokens, answer.num_cached)
        return {"usage": usage.as_json() if self._continuous else None}

    def _chunk(self, choices: list[dict[str, Any]], **others: Any) -> bytes:
        return b"data: " + orjson.dumps({**self._head, "choices": choices, **others}) + b"\n\n"


def ending(answer: Answer) -> dict[str, Any]:
    """Why an answer ended. One that failed has no answer, but an error."""
    completion = answer.completion
    assert completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), completion.finish_reason
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
