"""A completion under way: the text side of one request, from the engine's outputs to what a client is told."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hex_llm.engine.output import Output
from hex_llm.engine.request import FinishReason, Request, TokenLogprobs
from hex_llm.errors import HexError, NumericalError
from hex_llm.text.detokenizer import Detokenizer
from hex_llm.text.tokenizer import Tokenizer


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
class Answer:
    """A completion, and where its text comes from. What nobody has been told yet is kept in one piece, however many
    steps it took: a reader who falls behind finds more at once, not a queue.
    """

    request: Request
    completion: Completion
    detokenizer: Detokenizer
    num_cached: int = 0  # tokens of the prompt found in the prefix cache
    num_preemptions: int = 0  # times that it gave way, with the engine that has it now
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    failure: HexError | None = None  # what the completion's error says
    _unread: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, tokenizer: Tokenizer, request: Request, index: int) -> "Answer":
        sampling = request.sampling
        detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        return cls(request, Completion(index, logprobs=None if sampling.logprobs is None else []), detokenizer)

    @property
    def finished(self) -> bool:
        return self.completion.finish_reason is not None

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    def read(self) -> str:
        """The text since the last call."""
        text = "".join(self._unread)
        self._unread.clear()
        return text

    def take(self, output: Output) -> None:
        """Adds what a step brought."""
        completion = self.completion
        if not completion.token_ids:  # who goes on with the answer may not know
            self.num_cached = output.num_cached
        self.num_preemptions = output.num_preemptions
        completion.token_ids += output.tokens
        text = self.detokenizer.push(self._visible(output))
        if output.logprobs and completion.logprobs is not None:
            completion.logprobs += output.logprobs
        if output.prompt_logprobs:
            self.prompt_logprobs = list(output.prompt_logprobs)
        if self.detokenizer.stop_reason is not None:
            self._cut()
        elif output.finish_reason is not None:
            text += self.detokenizer.finish()
            self._finish(output)
        if text:
            completion.text += text
            self._unread.append(text)

    def fail(self, error: HexError) -> None:
        """Ends it with what there is."""
        self.failure = error
        self.completion.finish_reason, self.completion.error = FinishReason.ERROR, str(error)

    def _finish(self, output: Output) -> None:
        completion = self.completion
        completion.finish_reason = output.finish_reason
        if self.detokenizer.stop_reason is not None:  # completed by what was held back
            self._cut()
        elif output.finish_reason == FinishReason.STOP and output.tokens[-1] in self.request.sampling.stop_token_ids:
            completion.stop_reason = output.tokens[-1]
        elif output.finish_reason == FinishReason.ERROR:
            self.fail(
                NumericalError(
                    f"After {len(completion.token_ids)} tokens of the answer the model produced no usable number "
                    "(NaN, or nothing but -inf)."
                )
            )

    def _visible(self, output: Output) -> Sequence[int]:
        """An end token is not part of the text, whatever the tokenizer makes of it, unless what stops is asked for."""
        ended = output.finish_reason == FinishReason.STOP and not self.request.sampling.include_stop_str_in_output
        return output.tokens[:-1] if ended else output.tokens

    def _cut(self) -> None:
        self.completion.finish_reason = FinishReason.STOP
        self.completion.stop_reason = self.detokenizer.stop_reason
        del self.completion.token_ids[self.detokenizer.num_tokens :]
        if self.completion.logprobs:
            del self.completion.logprobs[self.detokenizer.num_tokens :]
