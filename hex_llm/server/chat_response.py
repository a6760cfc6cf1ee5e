"""Answers to /v1/chat/completions: a `chat.completion`, or a stream of `chat.completion.chunk`s."""

from collections.abc import Mapping, Sequence
from typing import Any

from hex_llm.completion import Answer
from hex_llm.server.chat_schema import ChatRequest
from hex_llm.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from hex_llm.server.sse import Stream, ending
from hex_llm.server.usage import usage_of
from hex_llm.text.tokenizer import Tokenizer


def chat_response(
    request: ChatRequest, answers: Sequence[Answer], tokenizer: Tokenizer, *, id: str, created: int, model: str
) -> dict[str, Any]:
    """The response, once all answers have ended well."""
    names = TokenNames(tokenizer, request.tokens_as_ids)
    response: dict[str, Any] = {
        **_head(id, "chat.completion", created, model),
        "choices": [_choice(request, answer, names, index) for index, answer in enumerate(answers)],
        "usage": usage_of(answers).as_json(),
    }
    answer = answers[0]
    if request.prompt_logprobs is not None and answer.prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs(
            names, answer.request.prompt, answer.prompt_logprobs, request.prompt_logprobs
        )
    if request.return_token_ids:
        response["prompt_token_ids"] = answer.request.prompt
    return response


def chat_stream(
    request: ChatRequest, answers: Sequence[Answer], tokenizer: Tokenizer, *, id: str, created: int, model: str
) -> Stream:
    return Stream(
        _ChatShape(request, tokenizer),
        _head(id, "chat.completion.chunk", created, model),
        answers,
        include_usage=request.include_usage,
        continuous=request.continuous_usage_stats,
    )


class _ChatShape:
    text_before = b'"delta":{"content":'
    text_after = b'},"logprobs":null,"finish_reason":null'
    no_text: Mapping[str, Any] = {"delta": {}}

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer):
        self.wants_logprobs = request.sampling.logprobs is not None
        self.wants_token_ids = request.return_token_ids
        self._names = TokenNames(tokenizer, request.tokens_as_ids)

    def first(self, index: int, answer: Answer) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        chunk: dict[str, Any] = {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
        return chunk | {"prompt_token_ids": answer.request.prompt} if self.wants_token_ids else chunk

    def text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def logprobs(self, index: int, answer: Answer, start: int) -> dict[str, Any]:
        return _logprobs(self._names, answer, start)


def _choice(request: ChatRequest, answer: Answer, names: TokenNames, index: int) -> dict[str, Any]:
    completion = answer.completion
    choice = {
        "index": index,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": None if completion.logprobs is None else _logprobs(names, answer, 0),
        **ending(answer),
    }
    return choice | {"token_ids": completion.token_ids} if request.return_token_ids else choice


def _logprobs(names: TokenNames, answer: Answer, start: int) -> dict[str, Any]:
    completion = answer.completion
    assert completion.logprobs is not None, "they were asked for"
    return chat_logprobs(names, completion.token_ids[start:], completion.logprobs[start:])


def _head(id: str, kind: str, created: int, model: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": created, "model": model}
