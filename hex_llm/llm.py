"""The engine without a server: prompts in, texts out."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hex_llm.build import build_engine, find_model
from hex_llm.config import Config
from hex_llm.engine.admission import new_request
from hex_llm.engine.output import Output
from hex_llm.engine.request import FinishReason, Request, SamplingParams, TokenLogprobs
from hex_llm.engine.sampling import check_sampling
from hex_llm.errors import RequestError
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


@dataclass(slots=True)
class Result:
    """A prompt and its `n` answers."""

    prompt: str | None  # None where the prompt was given as tokens
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class _Answer:
    """A completion under way, and where its text comes from."""

    request: Request
    result: Result
    completion: Completion
    detokenizer: Detokenizer

    def take(self, output: Output) -> str:
        """Adds what a step brought; returns the text it made final."""
        completion = self.completion
        completion.token_ids += output.tokens
        text = self.detokenizer.push(self._visible(output))
        if output.logprobs:
            completion.logprobs = [*(completion.logprobs or []), *output.logprobs]
        if output.prompt_logprobs:
            self.result.prompt_logprobs = list(output.prompt_logprobs)
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
        completion.text += text
        return text

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
    """A model, ready to generate. `LLM(model=..., max_model_len=...)`: the keywords are those of `Config`."""

    def __init__(self, model: str | None = None, *, config: Config | None = None, **flags: Any):
        self.config = config or Config(model=model, **flags)
        found = find_model(self.config)
        tokenizer = locate(self.config.tokenizer) if self.config.tokenizer else found.folder
        self.tokenizer = Tokenizer.load(tokenizer, mode=self.config.tokenizer_mode, model_folder=found.folder)
        self.tokenizer.check_embedding(found.arch.vocab_size)
        self.engine = build_engine(self.config, found)
        self._numbers = itertools.count()

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
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Result]:
        """The answers to prompts, each a text or a list of tokens, in their order."""
        several = _several(prompts)
        samplings = self._one_each(sampling, len(several))
        groups = [self._answers(prompt, each) for prompt, each in zip(several, samplings, strict=True)]
        answers = [answer for group in groups for answer in group]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not progress, transient=True) as bar:
            task = bar.add_task("Generating", total=len(answers))
            for answer, _ in self._run(answers):
                if answer.completion.finish_reason is not None:
                    bar.advance(task)
        return [group[0].result for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Result]:
        """The answers to conversations, by the model's chat template."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts = [encode_chat(self.tokenizer, conversation) for conversation in conversations]
        return self.generate(prompts, sampling or self.default_sampling(max_tokens=None), progress=progress)

    def stream_chat(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> Iterator[str]:
        """The answer to one conversation, piece by piece. Leaving the loop early ends the request."""
        sampling = sampling or self.default_sampling(max_tokens=None)
        for _, text in self._run(self._answers(encode_chat(self.tokenizer, messages), sampling)):
            if text:
                yield text

    def _one_each(self, sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or self.default_sampling()] * count
        if len(sampling) != count:
            raise RequestError(f"There are {count} prompts and {len(sampling)} SamplingParams; give one, or one each.")
        return list(sampling)

    def _answers(self, prompt: Prompt, sampling: SamplingParams) -> list[_Answer]:
        check_sampling(sampling, self.engine.limits.vocab_size)
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        bad_words = self.tokenizer.encode_bad_words(sampling.bad_words)
        number = next(self._numbers)
        result = Result(prompt if isinstance(prompt, str) else None, tokens, [])
        answers = []
        for index in range(sampling.n):
            request = new_request(
                f"{number}-{index}",
                tokens,
                sampling,
                self.engine.limits,
                end_ids=self.tokenizer.eos_ids,
                bad_words=bad_words,
                seed=self.config.seed + number,
                index=index,
            )
            detokenizer = Detokenizer(
                self.tokenizer,
                skip_special_tokens=sampling.skip_special_tokens,
                stop=sampling.stop,
                include_stop_str_in_output=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
            )
            completion = Completion(index)
            result.outputs.append(completion)
            answers.append(_Answer(request, result, completion, detokenizer))
        return answers

    def _run(self, answers: Sequence[_Answer]) -> Iterator[tuple[_Answer, str]]:
        """Runs requests to their end; yields each answer that grew, with the text it gained."""
        under_way = {answer.request.id: answer for answer in answers}
        try:
            for answer in answers:
                self.engine.add(answer.request)
            while under_way:
                for output in self.engine.step():
                    answer = under_way.get(output.request_id)
                    if answer is None:  # a stop string ended it, and a last step was under way
                        continue
                    text = answer.take(output)
                    if answer.completion.finish_reason is not None:
                        del under_way[output.request_id]
                        if output.finish_reason is None:
                            self.engine.abort(output.request_id, FinishReason.STOP)
                    yield answer, text
        finally:
            for request_id in under_way:
                self.engine.abort(request_id)
            while self.engine.has_work:  # nobody else steps the engine: what is under way must be read
                self.engine.step()


def _several(prompts: Any) -> list[Prompt]:
    """One prompt, a text or tokens, as a list of prompts; a list of prompts as it is."""
    return [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else list(prompts)
