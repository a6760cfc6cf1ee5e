"""The engine without a server: prompts in, texts out."""

import itertools
import queue
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hex_llm import log
from hex_llm.build import build_engine, find_model
from hex_llm.completion import Answer, Completion
from hex_llm.config import Config
from hex_llm.engine.admission import new_request
from hex_llm.engine.carrier import AdapterLost, FromCarrier
from hex_llm.engine.request import FinishReason, SamplingParams, TokenLogprobs
from hex_llm.engine.sampling import shown
from hex_llm.errors import ConfigError, RequestError, told_error
from hex_llm.lora.open_store import open_store
from hex_llm.source import text_folders
from hex_llm.text.chat import encode_chat
from hex_llm.text.tokenizer import Tokenizer

type Prompt = str | Sequence[int]
type Message = Mapping[str, Any]


@dataclass(slots=True)
class Result:
    """A prompt and its `n` answers."""

    prompt: str | None  # None where the prompt was given as tokens
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache by the first answer
    prompt_logprobs: list[TokenLogprobs | None] | None = None


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
        self.config.check_one_engine()
        found = find_model(self.config)
        tokenizer, model_folder = text_folders(self.config)
        self.tokenizer = Tokenizer.load(tokenizer, mode=self.config.tokenizer_mode, model_folder=model_folder)
        self.tokenizer.check_embedding(found.arch.vocab_size)
        self.engine = build_engine(self.config, found, hear=self.hear)
        self._store = open_store(self.config) if self.config.enable_lora else None
        self._numbers = itertools.count()
        self._under_way: dict[str, Answer] = {}
        self._stepping = False
        self._inbox: queue.SimpleQueue[FromCarrier] = queue.SimpleQueue()

    def hear(self, message: FromCarrier) -> None:
        """What the engine's carrier says, from any thread."""
        self._inbox.put(message)

    def default_sampling(self, **changes: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with changes."""
        return SamplingParams(**self.tokenizer.defaults.given | changes)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str] = "",
        progress: bool = True,
    ) -> list[Result]:
        """The answers to prompts, each a text or a list of tokens, in their order; by the model alone, or with an
        adapter, or one each: a name of `lora_modules`, or a source under `lora_allowed_prefixes`.
        """
        several = _several(prompts)
        samplings = self._one_each(sampling_params, len(several))
        adapters = [adapter] * len(several) if isinstance(adapter, str) else list(adapter)
        if len(adapters) != len(several):
            raise RequestError(f"There are {len(several)} prompts and {len(adapters)} adapters; give one, or one each.")
        asked = zip(several, samplings, adapters, strict=True)
        groups = [self._answers(*each) for each in asked]
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
        return [_result(prompt, group) for prompt, group in zip(several, groups, strict=True)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str] = "",
        progress: bool = True,
    ) -> list[Result]:
        """The answers to conversations, by the model's chat template."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts = [encode_chat(self.tokenizer, conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, adapter=adapter, progress=progress)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, *, adapter: str = ""
    ) -> Generator[str, None, FinishReason]:
        """The answer to one conversation, piece by piece, and at last why it ended. Leaving the loop early ends the
        request. NumericalError where the model breaks down; where the adapter cannot be had, what says so.
        """
        sampling = sampling_params or self.default_sampling()
        if sampling.n != 1:
            raise RequestError(f"n={sampling.n} must be 1: one answer is streamed.", param="n")
        (answer,) = self._answers(encode_chat(self.tokenizer, messages), sampling, adapter)
        with self._serving([answer]):
            while answer.has_unread or not answer.finished:
                if answer.has_unread:
                    yield answer.read()
                else:
                    self._step()
        if answer.failure is not None:
            raise answer.failure
        assert answer.completion.finish_reason is not None, "it has ended"
        return answer.completion.finish_reason

    def _one_each(self, sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or self.default_sampling()] * count
        if len(sampling) != count:
            raise RequestError(f"There are {count} prompts and {len(sampling)} SamplingParams; give one, or one each.")
        return list(sampling)

    def _answers(self, prompt: Prompt, sampling: SamplingParams, adapter: str) -> list[Answer]:
        source = self.config.adapter_sources.get(adapter, adapter)
        if source and self._store is None:
            raise RequestError(f"adapter={shown(adapter)} needs enable_lora=True.", param="adapter")
        identity = self._store.identify(source) if self._store and source else ""
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
                adapter=identity,
                adapter_source=source,
            )
            for index in range(sampling.n)
        ]
        return [Answer.of(self.tokenizer, request, index) for index, request in enumerate(requests)]

    @contextmanager
    def _serving(self, answers: Sequence[Answer]) -> Iterator[None]:
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
            finished += self._listen()
        finally:
            self._stepping = False
        return finished

    def _listen(self) -> list[str]:
        """Takes in what the engine's carrier has said, and waits for it where nothing else can go on; returns what was
        finished by it: the answers whose adapter cannot be had.
        """
        finished = []
        block = self.engine.is_stuck and self.engine.has_work
        while block or not self._inbox.empty():
            message = self._inbox.get()
            block = False
            ended = self.engine.hear(message)
            if isinstance(message, AdapterLost):
                for answer in filter(None, (self._under_way.pop(request_id, None) for request_id in ended)):
                    answer.fail(told_error(message.message, message.code, message.status))
                    finished.append(answer.request.id)
        return finished

    def _leave(self, answer: Answer) -> None:
        # A forgotten stream is closed by the garbage collector, which may run in the middle of a step. The engine must
        # not be touched then; the request ends with its next output.
        if self._under_way.pop(answer.request.id, None) and not self._stepping:
            self.engine.abort(answer.request.id)


def _result(prompt: Prompt, answers: Sequence[Answer]) -> Result:
    first = answers[0]
    return Result(
        prompt if isinstance(prompt, str) else None,
        list(first.request.prompt),
        [answer.completion for answer in answers],
        num_cached_tokens=first.num_cached,
        prompt_logprobs=first.prompt_logprobs,
    )


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
