"""The body of a request to /v1/completions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hex_llm.config import Config
from hex_llm.engine.sampling import SamplingParams
from hex_llm.errors import ContextTooLong, RequestError
from hex_llm.server.fields import (
    TOKEN_SCHEMA,
    Boolean,
    Field,
    Fields,
    Integer,
    Only,
    Rules,
    check_count,
    fields_schema,
    read_fields,
    read_tokens,
    refuse,
)
from hex_llm.server.sampling_fields import SAMPLING, check_sequences, read_sampling
from hex_llm.server.shared_fields import SHARED, read_shared

DEFAULT_MAX_TOKENS = 16
# Tokens of all prompts, before anybody looks at one of them: a list of millions takes its time.
MAX_PROMPT_TOKENS = 2**21

type Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """`include_usage` is None where the client sent no stream_options: then the last chunk has the usage, beside its
    choice. `prompt_logprobs` is how many alternatives to show as such; with echo, `sampling` may ask for more.
    """

    model: str | None
    adapter: str | None
    prompts: list[Prompt]
    sampling: SamplingParams
    echo: bool
    add_special_tokens: bool
    stream: bool
    include_usage: bool | None
    continuous_usage_stats: bool
    cache_salt: str | None
    return_token_ids: bool
    tokens_as_ids: bool
    prompt_logprobs: int | None
    request_id: str | None


@dataclass(frozen=True, slots=True)
class Prompts:
    """A text, a list of tokens, or a list of either."""

    def read(self, value: Any, param: str, rules: Rules) -> list[Prompt]:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise refuse(param, value, _MUST)
        if not value:
            raise _empty(param)
        if isinstance(value[0], int | float):
            _check_length(param, len(value))
            return [read_tokens(value, param, rules)]
        check_count(param, len(value), "max_prompts", rules)
        _check_length(param, sum(len(each) for each in value if isinstance(each, list)))
        single = len(value) == 1
        return [
            self._prompt(each, type(value[0]), param if single else f"{param}[{place}]", rules)
            for place, each in enumerate(value)
        ]

    @staticmethod
    def _prompt(value: Any, kind: type, param: str, rules: Rules) -> Prompt:
        if kind not in (str, list) or type(value) is not kind:
            raise refuse(param, value, _MUST if kind not in (str, list) else "a prompt of the same kind as the first")
        if not value:
            raise _empty(param)
        return value if isinstance(value, str) else read_tokens(value, param, rules)

    def schema(self, config: Config) -> dict[str, Any]:
        text = {"type": "string", "minLength": 1}
        tokens = {"type": "array", "items": TOKEN_SCHEMA, "minItems": 1}
        several = {"type": "array", "minItems": 1, "maxItems": config.max_prompts}
        return {"anyOf": [text, tokens, {**several, "items": text}, {**several, "items": tokens}]}


_MUST = "a string, a list of strings, a list of tokens or a list of lists of tokens"

FIELDS: Fields = {
    "prompt": Field(Prompts(), "What the answer goes on with: a text or its tokens, or several.", True),
    **SHARED,
    **SAMPLING,
    "max_tokens": SAMPLING["max_tokens"]._replace(help=f"Most tokens of the answer; {DEFAULT_MAX_TOKENS} by default."),
    "echo": Field(Boolean(), "Whether the prompt comes before the answer. With logprobs, it has some, too."),
    "logprobs": Field(
        Integer(0, "max_logprobs"), "Log-probabilities of the answer's tokens, with so many alternatives."
    ),
    "add_special_tokens": Field(Boolean(), "Whether a prompt that is a text begins as the tokenizer likes; true."),
    "suffix": Field(Only("", reason="texts are not filled in before a suffix."), "Not supported, unless empty."),
    "prompt_embeds": Field(Only(reason="prompts are texts or tokens."), "Not supported."),
    "messages": Field(Only(reason="this route takes a prompt; /v1/chat/completions takes messages."), "Not supported."),
}


def read_completion(
    body: dict[str, Any], config: Config, defaults: Mapping[str, Any], *, integral_floats: bool = False
) -> CompletionRequest:
    """The request that a body makes, or RequestError. `defaults` are the sampling values that the model recommends."""
    values = read_fields(body, FIELDS, Rules(config, integral_floats))
    echo = values.get("echo", False)
    sampling = read_sampling(
        values, config, defaults, max_tokens=DEFAULT_MAX_TOKENS, logprobs=values.get("logprobs"), echo=echo
    )
    check_sequences(sampling.n, len(values["prompt"]), config)
    return CompletionRequest(
        **read_shared(values, config),
        prompts=values["prompt"],
        sampling=sampling,
        echo=echo,
        add_special_tokens=values.get("add_special_tokens", True),
    )


def openapi(config: Config) -> dict[str, Any]:
    """The JSON Schema of the body."""
    return fields_schema(FIELDS, config)


def _check_length(param: str, num_tokens: int) -> None:
    if num_tokens > MAX_PROMPT_TOKENS:
        raise ContextTooLong(
            f"{param} has {num_tokens} tokens; no request may have more than {MAX_PROMPT_TOKENS}.", param=param
        )


def _empty(param: str) -> RequestError:
    return RequestError(f"{param} is empty; a prompt has at least one character, or one token.", param=param)
