"""How a request asks for sampling, on every route that generates: OpenAI's fields and vLLM's.

Ranges are those of `SamplingParams`, but for two without an upper end there: a temperature or a repetition penalty
beyond all use would overflow the device's numbers, and the answer would be an error of ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hex_llm.config import Config
from hex_llm.engine.sampling import (
    MAX_RULES,
    SamplingParams,
)
from hex_llm.errors import RequestError, Unsupported
from hex_llm.server.fields import (
    INT32_MAX,
    Boolean,
    Field,
    Fields,
    Integer,
    Number,
    Only,
    Rules,
    Texts,
    Tokens,
    check_count,
    describe,
    refuse,
)

_NO_GUIDING = "answers are free text; constraining them to a schema, a grammar or a choice does not exist yet."
_NO_MASK = "tokens can be made likelier or forbidden with logit_bias and bad_words."


@dataclass(frozen=True, slots=True)
class LogitBias:
    """An object from tokens, which as names are strings, to numbers."""

    def read(self, value: Any, param: str, rules: Rules) -> dict[int, float]:
        if not isinstance(value, dict):
            raise refuse(param, value, "an object from tokens to numbers")
        check_count(param, len(value), "max_logit_bias", rules)
        return {self._token(name, param): self._bias(name, bias, param, rules) for name, bias in value.items()}

    def schema(self, config: Config) -> dict[str, Any]:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": _BIAS.schema(config),
            "maxProperties": config.max_logit_bias,
        }

    @staticmethod
    def _token(name: Any, param: str) -> int:
        # Written in one way only: "7" and "07" would be two wishes for one token.
        digits = isinstance(name, str) and len(name) <= 10 and name.isascii() and name.isdigit()
        if not digits or str(int(name)) != name or int(name) > INT32_MAX:
            raise RequestError(
                f"{param} has the key {describe(name)}; keys are tokens, whole numbers from 0 to {INT32_MAX}.",
                param=param,
            )
        return int(name)

    @staticmethod
    def _bias(name: str, bias: Any, param: str, rules: Rules) -> float:
        return _BIAS.read(bias, f"{param}.{name}", rules)


_BIAS = Number(at_least=-100, at_most=100)

# Those that SamplingParams takes under the same name, as they were read.
_PASSED_ON: Fields = {
    "n": Field(Integer(1, "max_n"), "Answers to each prompt."),
    "temperature": Field(Number(at_least=0, at_most=100), "0 is greedy. Without it, what the model recommends, or 1."),
    "top_p": Field(Number(above=0, at_most=1), "The likeliest tokens that together have this probability."),
    "top_k": Field(Integer(-1, INT32_MAX), "The likeliest so many tokens; 0 or -1: all; 1 is greedy."),
    "min_p": Field(Number(at_least=0, at_most=1), "Tokens at least so likely, relative to the likeliest."),
    "repetition_penalty": Field(
        Number(at_least=0.01, at_most=100), "Above 1, tokens of prompt and answer become less likely."
    ),
    "presence_penalty": Field(
        Number(at_least=-2, at_most=2), "Taken from the logits of tokens that the answer has already."
    ),
    "frequency_penalty": Field(
        Number(at_least=-2, at_most=2), "Taken from the logits of tokens for each time that the answer has them."
    ),
    "logit_bias": Field(LogitBias(), "Added to the logits of tokens."),
    "bad_words": Field(Texts(most=MAX_RULES, longest="max_stop_length"), "Words that the answer never has."),
    "min_tokens": Field(Integer(0, INT32_MAX), "Tokens before which the answer does not end."),
    "stop": Field(
        Texts(most="max_stop_strings", longest="max_stop_length", single=True), "Texts before which the answer ends."
    ),
    "stop_token_ids": Field(Tokens("max_stop_token_ids"), "Tokens with which the answer ends."),
    "include_stop_str_in_output": Field(
        Boolean(), "Whether the stop string or token is part of the answer that it ended."
    ),
    "ignore_eos": Field(Boolean(), "Whether the answer goes on after the model's end token."),
    "skip_special_tokens": Field(Boolean(), "Whether special tokens are left out of the text; true by default."),
    "seed": Field(Integer(-(2**63), 2**63 - 1), "The same seed gives the same answer."),
}

SAMPLING: Fields = {
    **_PASSED_ON,
    "max_tokens": Field(Integer(1, INT32_MAX), "Most tokens of the answer."),
    "max_completion_tokens": Field(Integer(1, INT32_MAX), "The newer name of max_tokens."),
    "prompt_logprobs": Field(
        Integer(0, "max_logprobs"),
        "Log-probabilities of the prompt's tokens, with so many alternatives. Needs --enable_prompt_logprobs.",
    ),
    "best_of": Field(Integer(1, "max_n"), "The same as n, or left out: there is no choice among more answers."),
    "use_beam_search": Field(Only(False, reason="there is no beam search."), "Not supported."),
    "length_penalty": Field(Only(1, reason="it is about beam search, which does not exist."), "Not supported."),
    "early_stopping": Field(Only(False, reason="it is about beam search, which does not exist."), "Not supported."),
    "allowed_token_ids": Field(Only(reason=_NO_MASK), "Not supported."),
    "logits_processors": Field(Only([], reason="code does not come with requests."), "Not supported."),
    "truncate_prompt_tokens": Field(Only(reason="a prompt is never cut."), "Not supported."),
    "spaces_between_special_tokens": Field(
        Only(True, reason="the text is as the tokenizer decodes it."), "Not supported, unless true."
    ),
    "structured_outputs": Field(Only({}, reason=_NO_GUIDING), "Not supported."),
    **{
        f"guided_{what}": Field(Only(reason=_NO_GUIDING), "Not supported.")
        for what in ("json", "regex", "choice", "grammar", "decoding_backend", "whitespace_pattern")
    },
    "structural_tag": Field(Only(reason=_NO_GUIDING), "Not supported."),
    "response_format": Field(
        Only({"type": "text"}, reason='only {"type": "text"} is; ' + _NO_GUIDING), "Text, which is the default."
    ),
}


def read_sampling(
    values: Mapping[str, Any],
    config: Config,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None = None,
    logprobs: int | None = None,
    echo: bool = False,
) -> SamplingParams:
    """The sampling that checked values ask for. `defaults` are what the model recommends, `max_tokens` what counts
    where none is given; `logprobs` counts alternatives, of the prompt's tokens too where they are echoed.
    """
    n = values.get("n", 1)
    if values.get("best_of", n) != n:
        raise Unsupported(
            f"best_of={values['best_of']} is not n={n}: there is no choice among more answers than are returned.",
            param="best_of",
        )
    recommended = {name: value for name, value in defaults.items() if value is not None}
    asked = {name: value for name, value in values.items() if name in _PASSED_ON}
    return SamplingParams(
        **{
            **recommended,
            **asked,
            "max_tokens": _max_tokens(values, max_tokens),
            "logprobs": logprobs,
            "prompt_logprobs": _prompt_logprobs(values, config, logprobs if echo else None),
        }
    )


def check_sequences(n: int, num_prompts: int, config: Config) -> None:
    if n * num_prompts > config.max_sequences:
        prompts = f" for each of {num_prompts} prompts" if num_prompts > 1 else ""
        raise RequestError(
            f"n={n}{prompts} makes {n * num_prompts} answers; a request may have {config.max_sequences}"
            " (--max_sequences).",
            param="n",
        )


def _max_tokens(values: Mapping[str, Any], default: int | None) -> int | None:
    old, new = values.get("max_tokens"), values.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens={old} and max_completion_tokens={new} are two names of one limit; give one.",
            param="max_completion_tokens",
        )
    return new or old or default


def _prompt_logprobs(values: Mapping[str, Any], config: Config, echoed: int | None) -> int | None:
    asked: int | None = values.get("prompt_logprobs")
    if asked is None and echoed is None:
        return None
    if not config.enable_prompt_logprobs:
        what, param = ("prompt_logprobs", "prompt_logprobs") if echoed is None else ("logprobs with echo", "echo")
        raise Unsupported(
            f"{what} is not supported by this server: it was started without --enable_prompt_logprobs.", param=param
        )
    return max(asked or 0, echoed or 0)
