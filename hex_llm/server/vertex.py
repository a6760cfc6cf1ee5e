"""/generate, Vertex's predict route: all instances of a request run together, and each has one prediction."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import orjson

from hex_llm.completion import Answer
from hex_llm.engine.admission import new_request
from hex_llm.errors import RequestError, ServerError
from hex_llm.server.chat import answer_chat, encode_conversation
from hex_llm.server.chat_response import chat_response
from hex_llm.server.chat_schema import ChatRequest
from hex_llm.server.errors_json import error_body
from hex_llm.server.exchange import Exchange
from hex_llm.server.generation import Prompt
from hex_llm.server.generation import generate as generate_answers
from hex_llm.server.rendering import render
from hex_llm.server.state import Server
from hex_llm.server.streaming import stream
from hex_llm.server.vertex_schema import GenerateRequest, PromptRequest, read_generate


async def generate(server: Server, exchange: Exchange) -> None:
    body = await exchange.json()
    server.check_ready()
    asked = read_generate(body, server.config, server.tokenizer.defaults.given)
    if len(asked.chats) == 1:
        await _answer_one_chat(server, exchange, asked)
    elif asked.chats:
        await _answer_chats(server, exchange, asked)
    else:
        await _answer_prompts(server, exchange, asked)


async def _answer_one_chat(server: Server, exchange: Exchange, asked: GenerateRequest) -> None:
    """As /v1/chat/completions does; where it came as an instance, `predictions` is the answer itself, not a list."""
    wrap = _as_predictions if asked.wrapped else bytes
    try:
        await answer_chat(server, exchange, asked.chats[0], wrap=wrap)
    except RequestError as error:
        raise asked.places[0].locate(error) from None


def _as_predictions(body: bytes) -> bytes:
    return b'{"predictions":' + body + b"}"


async def _answer_chats(server: Server, exchange: Exchange, asked: GenerateRequest) -> None:
    samplings = [chat.sampling for chat in asked.chats]

    async def encode() -> Sequence[Prompt]:
        return await _encode_all(server, exchange, asked, asked.chats)

    async with generate_answers(server, exchange, encode, samplings, cache_salt=asked.cache_salt) as generation:
        await generation.finish()
        body = await render(generation.answers, lambda: _chat_predictions(server, exchange, asked, generation.answers))
        await exchange.reply(200, body)


def _chat_predictions(
    server: Server, exchange: Exchange, asked: GenerateRequest, answers: Sequence[Answer]
) -> dict[str, Any]:
    left, created = iter(answers), int(time.time())
    predictions = [
        chat_response(
            chat,
            [next(left) for _ in range(chat.sampling.n)],
            server.tokenizer,
            id=f"chatcmpl-{chat.request_id or f'{exchange.request_id}-{position}'}",
            created=created,
            model=chat.adapter or server.names[0],
        )
        for position, chat in enumerate(asked.chats)
    ]
    return {"predictions": predictions}


async def _answer_prompts(server: Server, exchange: Exchange, asked: GenerateRequest) -> None:
    samplings = [prompt.sampling for prompt in asked.prompts]
    first = asked.prompts[0]

    async def encode() -> Sequence[Prompt]:
        return await _encode_all(server, exchange, asked, asked.prompts)

    async with generate_answers(server, exchange, encode, samplings, cache_salt=asked.cache_salt) as generation:
        predictions = Predictions(generation.answers, every=first.flush_every or 1, framed=first.framed, raw=first.raw)
        if first.flush_every is None:
            await generation.finish()
            await exchange.reply(200, predictions.piece())
        else:
            await stream(exchange, generation, predictions)


async def _encode_all(
    server: Server, exchange: Exchange, asked: GenerateRequest, requests: Sequence[PromptRequest | ChatRequest]
) -> list[Prompt]:
    """The tokens and the adapter of every prompt. An error says which instance it is about."""
    outcomes = await asyncio.gather(
        *(_prepare(server, exchange, request) for request in requests), return_exceptions=True
    )
    prompts = []
    for outcome, request, place in zip(outcomes, requests, asked.places, strict=True):
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            # Bad words are not tokens yet; the rest of what depends on the model can be checked here.
            new_request("", outcome.tokens, dataclasses.replace(request.sampling, bad_words=()), server.limits)
        except RequestError as error:
            if isinstance(request, ChatRequest) and error.param == "prompt":  # which to the client are its messages
                error.param = "messages"
            raise place.locate(error) from None
        prompts.append(outcome)
    return prompts


async def _prepare(server: Server, exchange: Exchange, request: PromptRequest | ChatRequest) -> Prompt:
    tokens = await _encode(server, request)
    return Prompt(tokens, await server.find_adapter(request.adapter, exchange))


async def _encode(server: Server, request: PromptRequest | ChatRequest) -> list[int]:
    if isinstance(request, ChatRequest):
        return await encode_conversation(server, request)
    if isinstance(request.prompt, list):
        return request.prompt
    return await server.text.encode(request.prompt)


class Predictions:
    """What is told of answers, as JSON objects: all of it in one, or in pieces of `every` tokens, that put together
    are the texts. `raw` adds the tokens of each text in the same piece, and the log-probability of the answers so far.
    """

    keep_alive = b""  # there is nothing that a client would pass over

    def __init__(self, answers: Sequence[Answer], *, every: int, framed: bool, raw: bool):
        # With NULs in between it is no JSON; without, it is wherever all of it comes in one piece.
        self.content_type = "application/octet-stream" if framed else "application/json"
        self._answers = answers
        self._every = every
        self._framed = framed
        self._raw = raw
        self._open = list(range(len(answers)))
        self._told = [0] * len(answers)  # tokens
        self._logprobs = [0.0] * len(answers)

    def first(self) -> bytes:
        return b""

    def more(self, position: int, answer: Answer) -> bytes:
        """A piece is about all answers: it is written when the last of those that go on is asked for."""
        if position != self._open[-1]:
            return b""
        self._open = [each for each in self._open if not self._answers[each].finished]
        return self.piece() if not self._open or self._gained() >= self._every else b""

    def last(self) -> bytes:
        return b""

    def error(self, error: RequestError | ServerError) -> bytes:
        return self._frame(error_body(error))

    def piece(self) -> bytes:
        """All that was not told yet."""
        piece: dict[str, Any] = {"predictions": [answer.read() for answer in self._answers]}
        lengths = [len(answer.completion.token_ids) for answer in self._answers]
        if self._raw:
            piece["output_token_counts"] = [new - old for new, old in zip(lengths, self._told, strict=True)]
            self._add_logprobs()
            piece["cumulative_logprobs"] = self._logprobs
        self._told = lengths
        return self._frame(orjson.dumps(piece))

    def _gained(self) -> int:
        """The most tokens that an answer has which nobody was told of."""
        pairs = zip(self._answers, self._told, strict=True)
        return max(len(answer.completion.token_ids) - told for answer, told in pairs)

    def _add_logprobs(self) -> None:
        for position, answer in enumerate(self._answers):
            logprobs = answer.completion.logprobs
            assert logprobs is not None, "raw answers are sampled with them"
            if answer.finished:  # a stop string may have taken some away
                self._logprobs[position] = sum(each.logprob for each in logprobs)
            else:
                self._logprobs[position] += sum(each.logprob for each in logprobs[self._told[position] :])

    def _frame(self, body: bytes) -> bytes:
        return body + b"\0" if self._framed else body
