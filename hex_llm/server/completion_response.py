"""Answers to /v1/completions: a `text_completion`, whole or as a stream of the same."""

from collections.abc import Mapping, Sequence
from typing import Any

from hex_llm.completion import Answer
from hex_llm.server.completion_schema import CompletionRequest
from hex_llm.server.logprobs import TextOffsets, TokenNames, completion_logprobs, prompt_logprobs
from hex_llm.server.sse import Stream, ending
from hex_llm.server.usage import usage_of
from hex_llm.text.tokenizer import Tokenizer


def completion_response(
    request: CompletionRequest,
    answers: Sequence[Answer],
    tokenizer: Tokenizer,
    *,
    id: str,
    created: int,
    model: str,
    echo: Sequence[str] = (),
) -> dict[str, Any]:
    """The response, once all answers have ended well: those to the first prompt come first. `echo` are the texts of
    the prompts, where they are asked for.
    """
    shape = _CompletionShape(request, tokenizer, echo)
    return {
        **_head(id, created, model),
        "choices": [shape.choice(index, answer) for index, answer in enumerate(answers)],
        "usage": usage_of(answers).as_json(),
    }


def completion_stream(
    request: CompletionRequest,
    answers: Sequence[Answer],
    tokenizer: Tokenizer,
    *,
    id: str,
    created: int,
    model: str,
    echo: Sequence[str] = (),
) -> Stream:
    return Stream(
        _CompletionShape(request, tokenizer, echo),
        _head(id, created, model),
        answers,
        include_usage=request.include_usage,
        continuous=request.continuous_usage_stats,
    )


class _CompletionShape:
    text_before = b'"text":'
    text_after = b',"logprobs":null,"finish_reason":null'
    no_text: Mapping[str, Any] = {"text": ""}

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, echo: Sequence[str]):
        assert bool(echo) == request.echo, "echo needs the prompts' texts"
        self.wants_logprobs = request.sampling.logprobs is not None
        self.wants_token_ids = request.return_token_ids
        self._request = request
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, request.tokens_as_ids, before_bytes="bytes:")
        self._echo = echo
        self._offsets: dict[int, TextOffsets] = {}

    def first(self, index: int, answer: Answer) -> dict[str, Any] | None:
        if not self._echo and not self.wants_token_ids:
            return None
        choice = {"index": index, "text": self._echoed(index), "logprobs": None, "finish_reason": None}
        if self._echo and self.wants_logprobs:
            choice["logprobs"] = self._prompt_logprobs(answer)
        if self.wants_token_ids:
            choice |= {"prompt_token_ids": answer.request.prompt, "token_ids": []}
        return {"choices": [choice]}

    def text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, index: int, answer: Answer, start: int) -> dict[str, list[Any]]:
        completion = answer.completion
        assert completion.logprobs is not None, "they were asked for"
        if index not in self._offsets:
            self._offsets[index] = self._new_offsets(len(self._echoed(index)))
        tokens, logprobs = completion.token_ids[start:], completion.logprobs[start:]
        return completion_logprobs(self._names, self._offsets[index], tokens, logprobs, self._num_alternatives)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """A whole answer."""
        request, completion = self._request, answer.completion
        logprobs = None
        if self.wants_logprobs:
            logprobs = self.logprobs(index, answer, 0)
            if self._echo:
                before = self._prompt_logprobs(answer)
                logprobs = {name: before[name] + entries for name, entries in logprobs.items()}
        choice = {
            "index": index,
            "text": self._echoed(index) + completion.text,
            "logprobs": logprobs,
            **ending(answer),
        }
        if request.prompt_logprobs is not None and answer.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self._names, answer.request.prompt, answer.prompt_logprobs, request.prompt_logprobs
            )
        if self.wants_token_ids:
            choice |= {"prompt_token_ids": answer.request.prompt, "token_ids": completion.token_ids}
        return choice

    @property
    def _num_alternatives(self) -> int:
        return self._request.sampling.logprobs or 0

    def _echoed(self, index: int) -> str:
        return self._echo[index // self._request.sampling.n] if self._echo else ""

    def _prompt_logprobs(self, answer: Answer) -> dict[str, list[Any]]:
        assert answer.prompt_logprobs is not None, "echo asks for them"
        return completion_logprobs(
            self._names, self._new_offsets(0), answer.request.prompt, answer.prompt_logprobs, self._num_alternatives
        )

    def _new_offsets(self, start: int) -> TextOffsets:
        skip = self._request.sampling.skip_special_tokens
        return TextOffsets(self._tokenizer, start=start, skip_special_tokens=skip)


def _head(id: str, created: int, model: str) -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "created": created, "model": model}
