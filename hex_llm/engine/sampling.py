"""What sampling parameters may be: each is refused by name, with its value and its limit."""

import hashlib
import math
from collections.abc import Sequence

from hex_llm.engine.request import SamplingParams
from hex_llm.errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORD_TOKENS = 8
MAX_RULES = 1024  # per-token rules of one request that the device holds
MAX_LOGPROBS = 20


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuses what cannot be honoured: RequestError."""
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
    if sampling.seed is not None:
        _integer("seed", sampling.seed, -(2**63), 2**63 - 1)
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None:
            _integer(name, count, 0, min(MAX_LOGPROBS, vocab_size))
    _strings("stop", sampling.stop)
    _strings("bad_words", sampling.bad_words, most=MAX_RULES)
    _count("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKENS)
    for token in sampling.stop_token_ids:
        _token("stop_token_ids", token, vocab_size)
    _count("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS)
    for token, bias in sampling.logit_bias.items():
        _token("logit_bias", token, vocab_size)
        _number("logit_bias", bias, -100, 100)


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


def _refuse(name: str, value: object, must: str) -> RequestError:
    return RequestError(f"{name}={value!r} must be {must}.", param=name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refuse(name, value, f"a whole number from {low} to {high}")


def _number(name: str, value: object, low: float, high: float, *, open_below: bool = False) -> None:
    fits = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (low < value if open_below else low <= value)
        and value <= high
    )
    if not fits:
        below = f"above {low}" if open_below else f"at least {low}"
        raise _refuse(name, value, f"a number, {below}" + (f" and at most {high}" if high < math.inf else ""))


def _token(name: str, token: object, vocab_size: int) -> None:
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise RequestError(
            f"{name} has the token {token!r}; tokens of this model go from 0 to {vocab_size - 1}.", param=name
        )


def _count(name: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"{name} has {count} entries; it may have {most}.", param=name)


def _strings(name: str, values: Sequence[object], most: int = MAX_STOP_STRINGS) -> None:
    _count(name, len(values), most)
    for value in values:
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_STOP_LENGTH:
            shown = repr(value) if len(repr(value)) < 50 else f"one of {len(repr(value))} characters"
            raise RequestError(
                f"{name} has the entry {shown}; each must be a string of 1 to {MAX_STOP_LENGTH} characters.",
                param=name,
            )
