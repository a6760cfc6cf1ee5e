"""The engine without a server: prompts in, texts out."""

import itertools
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hex_llm import log
from hex_llm.build import build_engine, find_model
from hex_llm.config import Config
from hex_llm.engine.admission import new_request
from hex_llm.engine.output import Output
from hex_llm.engine.request import FinishReason, Request, SamplingParams, TokenLogprobs
from hex_llm.engine.sampling import shown
from hex_llm.errors import ConfigError, NumericalError, RequestError
from hex_llm.loader.source import locate
from hex_llm.text.chat import encode_chat
from hex_llm.text.detokenizer import Detokenizer
from hex_llm.text.tokenizer import Tokenizer

type Prompt = str | Sequence[int]
type Message = Mapping[str, Any]


@dataclass(slots=True)
class Completion:
    """One answer to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the stop token, that ended it
    error: str | None = None  # with finish_reason "error": what happened


@dataclass(slots=True)
class Result:
    """A prompt and its `n` answers."""

    prompt: str | None  # None where the prompt was given as tokens
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache by the first answer
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class _Answer:
    """A completion under way, and where its text comes from."""

    request: Request
    result: Result
    completion: Completion
    detokenizer: Detokenizer
    unread: str = ""  # text that nobody has been given yet

    def take(self, output: Output) -> None:
        """Adds what a step brought."""
        completion = self.completion
        completion.token_ids += output.tokens
        text = self.detokenizer.push(self._visible(output))
        if output.logprobs and completion.logprobs is not None:
            completion.logprobs += output.logprobs
        if output.prompt_logprobs:
            self.result.prompt_logprobs = list(output.prompt_logprobs)
        if completion.index == 0:
            self.result.num_cached_tokens = output.num_cached
        if self.detokenizer.stop_reason is not None:
            self._cut()
        elif output.finish_reason is not None:
            text += self.detokenizer.finish()
            completion.finish_reason = output.finish_reason
            if self.detokenizer.stop_reason is not None:  # completed by what was held back
                self._cut()
            elif (
                output.finish_reason == FinishReason.STOP and output.tokens[-1] in self.request.sampling.stop_token_ids
            ):
                completion.stop_reason = output.tokens[-1]
            elif output.finish_reason == FinishReason.ERROR:
                completion.error = (
                    f"After {len(completion.token_ids)} tokens of the answer the model produced no usable number "
                    "(NaN, or nothing but -inf)."
                )
        completion.text += text
        self.unread += text

    @property
    def finished(self) -> bool:
        return self.completion.finish_reason is not None

    def _visible(self, output: Output) -> Sequence[int]:
        """An end token is not part of the text, whatever the tokenizer would make of it."""
        return output.tokens[:-1] if output.finish_reason == FinishReason.STOP else output.tokens

    def _cut(self) -> None:
        self.completion.finish_reason = FinishReason.STOP
        self.completion.stop_reason = self.detokenizer.stop_reason
        del self.completion.token_ids[self.detokenizer.num_tokens :]
        if self.completion.logprobs:
            del self.completion.logprobs[self.detokenizer.num_tokens :]


class LLM:
    """A model, ready to generate. `LLM(model=..., max_model_len=...)`: the keywords are those of `Config`.

    One thread calls it. Calls may be interleaved: whichever steps the engine, every answer under way gets its part.
    """

    def __init__(self, model: str | None = None, *, config: Config | None = None, **flags: Any):
        if config is not None and (model is not None or flags):
            given = {"model": model} | flags if model is not None else flags
            raise ConfigError(
                "A config holds all settings; given with it, "
                f"{', '.join(f'{name}={value!r}' for name, value in given.items())} would be ignored."
            )
        log.configure_if_nobody_did()
        self.config = config or Config.from_keywords(model=model, **flags)
        found = find_model(self.config)
        tokenizer = locate(self.config.tokenizer) if self.config.tokenizer else found.folder
        self.tokenizer = Tokenizer.load(tokenizer, mode=self.config.tokenizer_mode, model_folder=found.folder)
        self.tokenizer.check_embedding(found.arch.vocab_size)
        self.engine = build_engine(self.config, found)
        self._numbers = itertools.count()
        self._under_way: dict[str, _Answer] = {}
        self._stepping = False

    def default_sampling(self, **changes: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with changes."""
        defaults = self.tokenizer.defaults
        recommended = {
            "temperature": defaults.temperature,
            "top_p": defaults.top_p,
            "top_k": defaults.top_k,
            "repetition_penalty": defaults.repetition_penalty,
        }
        return SamplingParams(**{name: value for name, value in recommended.items() if value is not None} | changes)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Result]:
        """The answers to prompts, each a text or a list of tokens, in their order."""
        several = _several(prompts)
        samplings = self._one_each(sampling_params, len(several))
        groups = [self._answers(prompt, each) for prompt, each in zip(several, samplings, strict=True)]
        answers = [answer for group in groups for answer in group]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = Progress(
            *columns, console=Console(stderr=True), disable=not (progress and sys.stderr.isatty()), transient=True
        )
        with bar, self._serving(answers):
            task = bar.add_task("Generating", total=len(answers))
            left = {answer.request.id for answer in answers}
            while left:
                finished = left.intersection(self._step())
                left -= finished
                bar.advance(task, len(finished))
        return [group[0].result for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Result]:
        """The answers to conversations, by the model's chat template."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts = [encode_chat(self.tokenizer, conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, progress=progress)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, FinishReason]:
        """The answer to one conversation, piece by piece, and at last why it ended. Leaving the loop early ends the
        request. NumericalError where the model breaks down.
        """
        sampling = sampling_params or self.default_sampling()
        if sampling.n != 1:
            raise RequestError(f"n={sampling.n} must be 1: one answer is streamed.", param="n")
        (answer,) = self._answers(encode_chat(self.tokenizer, messages), sampling)
        with self._serving([answer]):
            while answer.unread or not answer.finished:
                if answer.unread:
                    text, answer.unread = answer.unread, ""
                    yield text
                else:
                    self._step()
        if answer.completion.error:
            raise NumericalError(answer.completion.error)
        assert answer.completion.finish_reason is not None, "it has ended"
        return answer.completion.finish_reason

    def _one_each(self, sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or self.default_sampling()] * count
        if len(sampling) != count:
            raise RequestError(f"There are {count} prompts and {len(sampling)} SamplingParams; give one, or one each.")
        return list(sampling)

    def _answers(self, prompt: Prompt, sampling: SamplingParams) -> list[_Answer]:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        bad_words = self.tokenizer.encode_bad_words(sampling.bad_words)
        number = next(self._numbers)
        requests = [
            new_request(
                f"{number}-{index}",
                tokens,
                sampling,
                self.engine.limits,
                end_ids=self.tokenizer.eos_ids,
                bad_words=bad_words,
                seed=self.config.seed + number,
                index=index,
            )
            for index in range(sampling.n)
        ]
        result = Result(prompt if isinstance(prompt, str) else None, list(requests[0].prompt), [])
        answers = []
        for index, request in enumerate(requests):
            detokenizer = Detokenizer(
                self.tokenizer,
                skip_special_tokens=sampling.skip_special_tokens,
                stop=sampling.stop,
                include_stop_str_in_output=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
            )
            completion = Completion(index, logprobs=None if sampling.logprobs is None else [])
            result.outputs.append(completion)
            answers.append(_Answer(request, result, completion, detokenizer))
        return answers

    @contextmanager
    def _serving(self, answers: Sequence[_Answer]) -> Iterator[None]:
        """Has the engine work on answers, until they are finished or nobody wants them any more."""
        try:
            for answer in answers:
                self.engine.add(answer.request)
                self._under_way[answer.request.id] = answer
            yield
        finally:
            for answer in answers:
                self._leave(answer)
            # Nobody else steps the engine: what is under way must be read.
            while not (self._stepping or self._under_way or self.engine.is_dead) and self.engine.has_work:
                self._step()

    def _step(self) -> list[str]:
        """Steps the engine and gives every answer its part, whoever waits for it; returns what was finished by it."""
        finished = []
        self._stepping = True
        try:
            for output in self.engine.step():
                answer = self._under_way.get(output.request_id)
                if answer is None:  # left during the step
                    self.engine.abort(output.request_id)
                    continue
                answer.take(output)
                if answer.finished:
                    finished.append(output.request_id)
                    del self._under_way[output.request_id]
                    self.engine.abort(output.request_id, FinishReason.STOP)  # where it was a stop string
        finally:
            self._stepping = False
        return finished

    def _leave(self, answer: _Answer) -> None:
        # A forgotten stream is closed by the garbage collector, which may run in the middle of a step. The engine must
        # not be touched then; the request ends with its next output.
        if self._under_way.pop(answer.request.id, None) and not self._stepping:
            self.engine.abort(answer.request.id)


def _several(prompts: Any) -> list[Prompt]:
    """One prompt, a text or tokens, as a list of prompts; a list of prompts as it is."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        several = list(prompts)
    except TypeError:
        raise RequestError(
            f"prompts={shown(prompts)} must be a text, a list of tokens, or a list of these.", param="prompts"
        ) from None
    return [several] if several and isinstance(several[0], Integral) else several
