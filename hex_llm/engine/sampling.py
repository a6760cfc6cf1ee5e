"""Sampling parameters, and what they may be: each is refused by name, with its value and its limit."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hex_llm.errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORD_TOKENS = 8
MAX_RULES = 1024  # per-token rules of one request that the device holds
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Names and meanings are vLLM's, but for one default: without
    `max_tokens` an answer may go on as far as the context allows.

    What no model could honour is refused here, with a RequestError; what depends on the model, where a request is
    made of it.
    """

    n: int = 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all; 1 is greedy, whatever the temperature
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None  # None: as far as the context allows
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None  # how many alternatives, 0: only the token's own
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # A single string or a list is as good as a tuple, and None as nothing; what is kept can be neither changed
        # nor misread.
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            kept = (value,) if isinstance(value, str) else _tuple(name, value, "a string or a list of strings")
            object.__setattr__(self, name, kept)
        tokens = _tuple("stop_token_ids", self.stop_token_ids, "a list of tokens")
        object.__setattr__(self, "stop_token_ids", tokens)
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise _refuse("logit_bias", bias, "a mapping from tokens to numbers")
        object.__setattr__(self, "logit_bias", dict(bias))
        _check_values(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


def _check_values(sampling: SamplingParams) -> None:
    _integer("n", sampling.n, 1, MAX_N)
    _number("temperature", sampling.temperature, 0, math.inf)
    _number("top_p", sampling.top_p, 0, 1, open_below=True)
    _integer("top_k", sampling.top_k, -1, 2**31 - 1)
    _number("min_p", sampling.min_p, 0, 1)
    _number("repetition_penalty", sampling.repetition_penalty, 0, math.inf, open_below=True)
    _number("presence_penalty", sampling.presence_penalty, -2, 2)
    _number("frequency_penalty", sampling.frequency_penalty, -2, 2)
    if sampling.max_tokens is not None:
        _integer("max_tokens", sampling.max_tokens, 1, 2**31 - 1)
    _integer("min_tokens", sampling.min_tokens, 0, 2**31 - 1)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise RequestError(
            f"min_tokens={sampling.min_tokens} is more than max_tokens={sampling.max_tokens}.", param="min_tokens"
        )
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
        if not isinstance(value := getattr(sampling, name), bool):
            raise _refuse(name, value, "True or False")
    if sampling.seed is not None:
        _integer("seed", sampling.seed, -(2**63), 2**63 - 1)
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None:
            _integer(name, count, 0, MAX_LOGPROBS)
    _strings("stop", sampling.stop, MAX_STOP_STRINGS)
    _strings("bad_words", sampling.bad_words, MAX_RULES)
    _count("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKENS)
    _count("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS)
    for bias in sampling.logit_bias.values():
        _number("logit_bias", bias, -100, 100)


def check_vocabulary(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuses tokens that the model does not have: RequestError."""
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None:
            _integer(name, count, 0, min(MAX_LOGPROBS, vocab_size))
    for token in sampling.stop_token_ids:
        _token("stop_token_ids", token, vocab_size)
    for token in sampling.logit_bias:
        _token("logit_bias", token, vocab_size)


def check_rules(
    sampling: SamplingParams, bad_words: Sequence[Sequence[int]], num_stop_ids: int, vocab_size: int
) -> None:
    """Refuses more rules than the device holds for one request: RequestError.

    A rule is an entry of logit_bias, a bad word as tokens, or, with min_tokens, an end or stop token.
    """
    for word in bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"bad_words has a word of {len(word)} tokens; it must have 1 to {MAX_BAD_WORD_TOKENS}.",
                param="bad_words",
            )
        for token in word:
            _token("bad_words", token, vocab_size)
    held_back = num_stop_ids if sampling.min_tokens else 0
    rules = len(sampling.logit_bias) + len(bad_words) + held_back
    if rules > MAX_RULES:
        raise RequestError(
            f"logit_bias ({len(sampling.logit_bias)}), bad_words ({len(bad_words)}) and the end tokens held back by "
            f"min_tokens ({held_back}) make {rules} rules; a request may have {MAX_RULES}.",
            param="bad_words" if bad_words else "logit_bias",
        )


def fold_seed(seed: int, index: int = 0) -> int:
    """32 bits from a seed of 64, others for each of the `n` outputs of a prompt."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:4])


def shown(value: object) -> str:
    """A value as a message can hold it."""
    try:
        text = repr(value)
    except ValueError:  # an integer that Python does not care to write out
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _refuse(name: str, value: object, must: str) -> RequestError:
    return RequestError(f"{name}={shown(value)} must be {must}.", param=name)


def _tuple(name: str, value: Any, must: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise _refuse(name, value, must)
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refuse(name, value, f"a whole number from {low} to {high}")


def _number(name: str, value: object, low: float, high: float, *, open_below: bool = False) -> None:
    fits = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and _is_finite(value)
        and (low < value if open_below else low <= value)
        and value <= high
    )
    if not fits:
        below = f"above {low}" if open_below else f"at least {low}"
        above = f"at most {high}" if high < math.inf else "finite"
        raise _refuse(name, value, f"a number, {below} and {above}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _token(name: str, token: object, vocab_size: int) -> None:
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise RequestError(
            f"{name} has the token {shown(token)}; tokens of this model go from 0 to {vocab_size - 1}.", param=name
        )


def _count(name: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"{name} has {count} entries; it may have {most}.", param=name)


def _strings(name: str, values: Sequence[object], most: int) -> None:
    _count(name, len(values), most)
    for value in values:
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"{name} has the entry {shown(value)}; each must be a string of 1 to {MAX_STOP_LENGTH} characters.",
                param=name,
            )
