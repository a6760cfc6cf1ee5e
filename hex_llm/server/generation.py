"""From checked prompts to answers: one HTTP request's sequences in the engine, and what has come of them so far."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from hex_llm.completion import Answer
from hex_llm.engine.admission import new_request
from hex_llm.engine.output import Output
from hex_llm.engine.request import FinishReason, SamplingParams
from hex_llm.engine.router import Router
from hex_llm.errors import HexError
from hex_llm.server.adapters import Adapter
from hex_llm.server.exchange import Exchange
from hex_llm.server.metrics import Metrics
from hex_llm.server.state import Server


class Prompt(NamedTuple):
    """What the engine needs of a prompt, beside how its answers are sampled."""

    tokens: Sequence[int]
    adapter: Adapter


class Generation:
    """The answers to one request, those of the first prompt first. `wait` returns when there is more of them."""

    def __init__(self, answers: Sequence[Answer], engine: Router, metrics: Metrics):
        self.answers = answers
        self._engine = engine
        self._metrics = metrics
        self.num_left = len(answers)  # that have not ended
        self._news = False
        self._reader: asyncio.Future[None] | None = None  # who waits for news: one task at most, woken for every token
        self._error: Exception | None = None
        self.started = time.monotonic()
        self.queued_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def finished(self) -> bool:
        return not self.num_left

    async def wait(self) -> None:
        """Until an answer has more than at the last call. Raises what the request failed with."""
        if not self._news:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._news = False
        if self._error is not None:
            raise self._error

    async def finish(self) -> None:
        while not self.finished:
            await self.wait()

    def begin(self, group: str) -> None:
        """Hands all sequences to the engine. `group` is the HTTP request that they belong to."""
        for answer in self.answers:
            self._engine.add(answer.request, _Sequence(self, answer, self._engine, self._metrics), group)

    def end(self) -> None:
        """Nobody wants more of it."""
        if self.num_left:
            self._engine.abort([answer.request.id for answer in self.answers if not answer.finished])

    def changed(self, *, finished: bool) -> None:
        self.num_left -= finished
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        self._news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _Sequence:
    """Where the engine's outputs for one answer go, and how long they took."""

    __slots__ = ("_answer", "_begun", "_engine", "_first", "_generation", "_last", "_metrics", "_started")

    def __init__(self, generation: Generation, answer: Answer, engine: Router, metrics: Metrics):
        self._generation = generation
        self._answer = answer
        self._engine = engine
        self._metrics = metrics
        self._started = self._begun = self._first = self._last = time.monotonic()

    def begin(self, waited: float) -> None:
        self._begun = self._started + waited
        if self._generation.queued_s is None:
            self._generation.queued_s = waited
        self._metrics.queue_time.observe(waited)

    def take(self, output: Output) -> None:
        answer, now = self._answer, time.monotonic()
        if answer.completion.token_ids:
            self._metrics.inter_token.observe(now - self._last)
        elif output.tokens:
            self._first = now
            self._metrics.time_to_first_token.observe(now - self._started)
            self._metrics.prefill_time.observe(now - self._begun)
            if self._generation.first_token_s is None:
                self._generation.first_token_s = now - self._generation.started
        self._last = now
        answer.take(output)
        if not answer.finished:
            self._generation.changed(finished=False)
        elif answer.failure is not None:
            self._metrics.nan_rows.inc()
            self._generation.fail(answer.failure)
        else:
            self._end(output, now)

    def fail(self, error: HexError) -> None:
        self._generation.fail(error)

    def _end(self, output: Output, now: float) -> None:
        answer, metrics = self._answer, self._metrics
        if output.finish_reason is None:  # a stop string, of which the engine knows nothing
            self._engine.abort([answer.request.id], FinishReason.STOP)
        length = len(answer.completion.token_ids)
        metrics.success.labels(metrics.model, answer.completion.finish_reason).inc()
        metrics.end_to_end.observe(now - self._started)
        metrics.decode_time.observe(now - self._first)
        metrics.answer_lengths.observe(length)
        if length > 1:
            metrics.per_output_token.observe((now - self._first) / (length - 1))
        self._generation.changed(finished=True)


@asynccontextmanager
async def generate(
    server: Server,
    exchange: Exchange,
    encode: Callable[[], Awaitable[Sequence[Prompt]]],
    samplings: Sequence[SamplingParams],
    *,
    cache_salt: str | None = None,
) -> AsyncIterator[Generation]:
    """Has the engine answer the prompts that `encode` gives, `samplings[i].n` times each. Leaving it ends what is not
    finished.
    """
    server.check_ready()
    metrics = server.metrics
    with server.admission.enter(sum(sampling.n for sampling in samplings)) as ticket:
        prompts = await encode()
        salt = server.salt(exchange.key_id, cache_salt)
        answers = []
        for prompt, sampling in zip(prompts, samplings, strict=True):
            bad_words = await server.text.encode_bad_words(sampling.bad_words) if sampling.bad_words else ()
            seed = server.new_seed()
            answers += [
                Answer.of(
                    server.tokenizer,
                    new_request(
                        server.new_id(),
                        prompt.tokens,
                        sampling,
                        server.limits,
                        end_ids=server.tokenizer.eos_ids,
                        bad_words=bad_words,
                        seed=seed,
                        index=index,
                        adapter=prompt.adapter.identity,
                        adapter_source=prompt.adapter.source,
                        caller=exchange.key_id or "",
                        cache_salt=salt,
                    ),
                    index,
                )
                for index in range(sampling.n)
            ]
            metrics.prompt_lengths.observe(len(prompt.tokens))
            metrics.asked_n.observe(sampling.n)
            metrics.asked_tokens.observe(answers[-1].request.max_output)
        tokens = sum(len(prompt.tokens) for prompt in prompts)
        server.admission.add_tokens(ticket, tokens)
        metrics.count_prompt(tokens)
        generation = Generation(answers, server.engine, metrics)
        exchange.generation = generation
        try:
            generation.begin(exchange.request_id)
            yield generation
        finally:
            generation.end()
            metrics.cached_tokens.inc(sum(answer.num_cached for answer in answers if answer.completion.index == 0))
