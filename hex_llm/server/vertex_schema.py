"""The body of a request to /generate: Vertex's instances and parameters, or one instance alone.

An instance is a prompt and how to sample, or, marked by `"@requestFormat": "chatCompletions"`, the body of a chat.
What Hex-LLM does with a request that names no max_tokens is not known; here it is 16 tokens, as in vLLM and its
relative on Vertex.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hex_llm.config import Config
from hex_llm.engine.sampling import SamplingParams
from hex_llm.errors import RequestError, Unsupported
from hex_llm.server.adapter_fields import ADAPTER, read_adapter
from hex_llm.server.chat_schema import ChatRequest, read_chat
from hex_llm.server.completion_schema import DEFAULT_MAX_TOKENS
from hex_llm.server.fields import (
    INT32_MAX,
    MAX_SHOWN,
    TOKEN_SCHEMA,
    Boolean,
    Field,
    Fields,
    Integer,
    Only,
    Rules,
    check_count,
    describe,
    fields_schema,
    read_fields,
    read_tokens,
    refuse,
)
from hex_llm.server.sampling_fields import SAMPLING, read_sampling
from hex_llm.server.shared_fields import SHARED

_FORMAT = "@requestFormat"
_CHAT = "chatCompletions"
# What Vertex's own clients put beside a chat, about filters that are Vertex's.
_VERTEX_EXTRAS = ("google", "model_safety_settings")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """One prompt. `flush_every` counts tokens between two pieces of an answer; None: it comes whole. `framed` pieces
    end with a NUL; `raw` adds how many tokens there are and how likely they were.
    """

    prompt: str | list[int]
    sampling: SamplingParams
    flush_every: int | None = None
    framed: bool = False
    raw: bool = False
    adapter: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where an instance and its defaults stand in a body, so that an error can say it."""

    path: str  # empty: the body is the instance
    own: Mapping[str, Any]
    parameters: Mapping[str, Any]

    def locate(self, error: RequestError) -> RequestError:
        """The same error of the same member, by its full name; one about the server and not the body is as it was."""
        if not self.path or error.status != RequestError.status:
            return error
        param = error.param or ""
        name = param.split(".")[0].split("[")[0]
        path = "parameters" if name in self.parameters and name not in self.own else self.path
        message = f"{path}.{error}" if param and str(error).startswith(param) else f"{path}: {error}"
        return type(error)(message, param=f"{path}.{param}" if param else path, code=error.code)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Prompts or chats, never both. `places` say where each stands; `wrapped` is whether in instances."""

    prompts: tuple[PromptRequest, ...]
    chats: tuple[ChatRequest, ...]
    places: tuple[Place, ...]
    wrapped: bool

    @property
    def cache_salt(self) -> str | None:
        return (self.prompts or self.chats)[0].cache_salt


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or a list of tokens."""

    def read(self, value: Any, param: str, rules: Rules) -> str | list[int]:
        if not isinstance(value, str | list):
            raise refuse(param, value, "a string or a list of tokens")
        if not value:
            raise RequestError(f"{param} is empty; a prompt has at least one character, or one token.", param=param)
        return value if isinstance(value, str) else read_tokens(value, param, rules)

    def schema(self, config: Config) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": TOKEN_SCHEMA, "minItems": 1}]}


FIELDS: Fields = {
    "prompt": Field(Prompt(), "What the answer goes on with: a text or its tokens.", True),
    **{name: field for name, field in SAMPLING.items() if name != "max_completion_tokens"},
    "max_tokens": Field(
        Integer(0, INT32_MAX),
        f"Most tokens of the answer; 0: as many as the context has room for. {DEFAULT_MAX_TOKENS} by default.",
    ),
    "n": Field(Only(1, reason="an instance has one prediction; send it as several instances."), "1."),
    "prompt_logprobs": Field(Only(reason="a prediction is a text; /v1/completions has them."), "Not supported."),
    "logprobs": Field(
        Only(reason="a prediction is a text; /v1/completions has them, and raw_response tells their sum."),
        "Not supported.",
    ),
    "stream": Field(Boolean(), "Whether the answer comes in pieces: JSON objects, each with a NUL behind it."),
    "streaming_tokens": Field(
        Integer(1, INT32_MAX),
        "The answer comes in pieces of so many tokens. Without stream, they are JSON objects with nothing between.",
    ),
    "raw_response": Field(Boolean(), "Whether output_token_counts and cumulative_logprobs come with predictions."),
    "model": SHARED["model"]._replace(help="A label, unless it is the name of an adapter: there is one model here."),
    "cache_salt": SHARED["cache_salt"],
    "user": SHARED["user"],
    "request_id": SHARED["request_id"]._replace(help="A label: it changes nothing."),
    **ADAPTER,
    "messages": Field(Only(reason=f'a chat has "{_FORMAT}": "{_CHAT}" beside its messages.'), "Not supported."),
}


def read_generate(body: dict[str, Any], config: Config, defaults: Mapping[str, Any]) -> GenerateRequest:
    """The request that a body makes, or RequestError. `defaults` are the sampling values that the model recommends."""
    wrapped = "instances" in body
    places = tuple(_places(body, config)) if wrapped else (Place("", body, {}),)
    requests = []
    for place in places:
        try:
            requests.append(_read_instance(_merged(place), config, defaults))
        except RequestError as error:
            raise place.locate(error) from None
    prompts = tuple(each for each in requests if isinstance(each, PromptRequest))
    chats = tuple(each for each in requests if isinstance(each, ChatRequest))
    if prompts and chats:
        raise RequestError(
            f"Some instances are chats and {len(prompts)} of {len(requests)} are not.", param="instances"
        )
    _check_together(requests, chats, config)
    return GenerateRequest(prompts, chats, places, wrapped)


def openapi(config: Config) -> dict[str, Any]:
    """The JSON Schema of the body."""
    instance = fields_schema(FIELDS, config)
    chat = {"type": "object", "properties": {_FORMAT: {"const": _CHAT}}, "required": [_FORMAT]}
    several = {"type": "array", "items": {"anyOf": [instance, chat]}, "minItems": 1, "maxItems": config.max_instances}
    vertex = {
        "type": "object",
        "properties": {
            "instances": {**several, "description": "What to answer; there is one prediction for each."},
            "parameters": {"type": "object", "description": "Members of every instance that has not its own."},
        },
        "required": ["instances"],
        "additionalProperties": False,
    }
    return {"anyOf": [vertex, instance, chat]}


def _places(body: dict[str, Any], config: Config) -> list[Place]:
    for name in body:
        if name not in ("instances", "parameters"):
            raise Unsupported(
                f"{describe(name)} stands beside instances, where only parameters may; put it into parameters or into "
                "an instance.",
                param=name[:MAX_SHOWN],
            )
    instances, parameters = body["instances"], body.get("parameters")
    if not isinstance(instances, list) or not instances:
        raise refuse("instances", instances, "a list of at least one instance")
    check_count("instances", len(instances), "max_instances", Rules(config))
    if not isinstance(parameters, dict | None):
        raise refuse("parameters", parameters, "an object")
    for position, instance in enumerate(instances):
        if not isinstance(instance, dict):
            raise refuse(f"instances[{position}]", instance, "an object")
    return [Place(f"instances[{position}]", own, parameters or {}) for position, own in enumerate(instances)]


def _merged(place: Place) -> dict[str, Any]:
    """An instance with the parameters as its defaults: null is the same as leaving a member out."""
    own = {name: value for name, value in place.own.items() if value is not None or name not in place.parameters}
    # Whatever either of them calls it, an adapter is one member.
    has_adapter = any(own.get(name) is not None for name in ADAPTER)
    defaults = {name: value for name, value in place.parameters.items() if not (has_adapter and name in ADAPTER)}
    return {**defaults, **own}


def _read_instance(body: dict[str, Any], config: Config, defaults: Mapping[str, Any]) -> PromptRequest | ChatRequest:
    asked = body.pop(_FORMAT, None)
    if asked == _CHAT:
        return _read_chat(body, config, defaults)
    if asked is not None:
        raise refuse(_FORMAT, asked, f"{_CHAT}, or left out")
    values = read_fields(body, FIELDS, Rules(config, integral_floats=True))
    values.pop("n", None)
    raw = values.get("raw_response", False)
    # 0 is how Hex-LLM's clients ask for as much as there may be; everywhere else that is to ask for nothing.
    limited = values.get("max_tokens", DEFAULT_MAX_TOKENS) > 0
    sampling = read_sampling(
        values, config, defaults, max_tokens=DEFAULT_MAX_TOKENS if limited else None, logprobs=0 if raw else None
    )
    framed = values.get("stream", False)
    return PromptRequest(
        prompt=values["prompt"],
        sampling=sampling,
        flush_every=values.get("streaming_tokens", 1 if framed else None),
        framed=framed,
        raw=raw,
        adapter=read_adapter(values, config),
        cache_salt=values.get("cache_salt"),
    )


def _read_chat(body: dict[str, Any], config: Config, defaults: Mapping[str, Any]) -> ChatRequest:
    # Any name of the model does: Vertex's clients have no use for it, and send what they like; but not an adapter's.
    is_adapter = isinstance(body.get("model"), str) and body["model"] in config.adapter_sources
    passed_over = _VERTEX_EXTRAS if is_adapter else (*_VERTEX_EXTRAS, "model")
    rest = {name: value for name, value in body.items() if name not in passed_over}
    return read_chat(rest, config, defaults, integral_floats=True)


def _check_together(
    requests: list[PromptRequest | ChatRequest], chats: tuple[ChatRequest, ...], config: Config
) -> None:
    """What instances of one request share, for it has one answer."""
    sequences = sum(each.sampling.n for each in requests)
    if sequences > config.max_sequences:
        raise RequestError(
            f"The instances ask for {sequences} answers; a request may have {config.max_sequences} (--max_sequences).",
            param="instances",
        )
    shared = {"cache_salt": "cache_salt"}
    if not chats:
        shared |= {"framed": "stream", "flush_every": "streaming_tokens", "raw": "raw_response"}
    for attribute, name in shared.items():
        for position, each in enumerate(requests):
            if getattr(each, attribute) != getattr(requests[0], attribute):
                raise RequestError(
                    f"instances[{position}].{name} is not that of instances[0]; put it into parameters, for all.",
                    param=f"instances[{position}].{name}",
                )
    for position, chat in enumerate(chats):
        if chat.stream and len(chats) > 1:
            raise RequestError(
                f"instances[{position}].stream is true, but there are {len(chats)} chats; only one can be streamed.",
                param=f"instances[{position}].stream",
            )
