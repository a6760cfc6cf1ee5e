"""The body of a request to /v1/chat/completions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hex_llm.config import Config
from hex_llm.engine.sampling import SamplingParams
from hex_llm.errors import RequestError, Unsupported
from hex_llm.server.fields import (
    AnyObject,
    Boolean,
    Field,
    Fields,
    Integer,
    Only,
    Rules,
    Text,
    check_count,
    describe,
    fields_schema,
    read_fields,
    refuse,
)
from hex_llm.server.sampling_fields import SAMPLING, check_sequences, read_sampling
from hex_llm.server.shared_fields import SHARED, read_shared
from hex_llm.text.chat import ROLES

MAX_PARTS = 4096  # of one message
MAX_TOOL_CALLS = 128

_NO_TOOLS = "calling tools does not exist yet."
_NO_AUDIO = "models read and write text only."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """`include_usage` is None where the client sent no stream_options: then the last chunk has the usage, beside its
    choice. `prompt_logprobs` is how many alternatives to show; `template_kwargs` are for the template to judge.
    """

    model: str | None
    adapter: str | None
    messages: list[dict[str, Any]]
    sampling: SamplingParams
    stream: bool
    include_usage: bool | None
    continuous_usage_stats: bool
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]
    cache_salt: str | None
    return_token_ids: bool
    tokens_as_ids: bool
    prompt_logprobs: int | None
    request_id: str | None


@dataclass(frozen=True, slots=True)
class Content:
    """A string, or a list of parts that are texts."""

    def read(self, value: Any, param: str, rules: Rules) -> str | list[dict[str, Any]]:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise refuse(param, value, "a string or a list of text parts")
        check_count(param, len(value), MAX_PARTS, rules)
        for place, part in enumerate(value):
            # Most are right, and there may be many: the words are for those that are not.
            right = type(part) is dict and len(part) == 2 and part.get("type") == "text"
            if not right or type(part.get("text")) is not str:
                raise _bad_part(part, f"{param}[{place}]")
        return value

    def schema(self, config: Config) -> dict[str, Any]:
        part = {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
            "additionalProperties": False,
        }
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": part, "maxItems": MAX_PARTS}]}


@dataclass(frozen=True, slots=True)
class Role:
    def read(self, value: Any, param: str, rules: Rules) -> str:
        if value not in ROLES:
            raise refuse(param, value, f"one of {', '.join(ROLES)}")
        return value

    def schema(self, config: Config) -> dict[str, Any]:
        return {"enum": list(ROLES)}


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Calls in the history of a conversation, which the template writes as it likes."""

    def read(self, value: Any, param: str, rules: Rules) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            raise refuse(param, value, "a list of objects")
        check_count(param, len(value), MAX_TOOL_CALLS, rules)
        for place, call in enumerate(value):
            if not isinstance(call, dict):
                raise refuse(f"{param}[{place}]", call, "an object")
        return value

    def schema(self, config: Config) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOL_CALLS}


MESSAGE: Fields = {
    "role": Field(Role(), "Who speaks. What else than user and assistant there may be, the template knows.", True),
    "content": Field(Content(), "What is said; not needed beside tool_calls."),
    "name": Field(Text(at_most=256), "For the template."),
    "tool_calls": Field(ToolCalls(), "For the template."),
    "tool_call_id": Field(Text(at_most=256), "For the template."),
    "refusal": Field(Text(at_most=2**20), "For the template."),
    "reasoning_content": Field(Text(at_most=2**24), "For the template."),
    "annotations": Field(Only([], reason="templates know nothing of them."), "Not supported."),
    "audio": Field(Only(reason=_NO_AUDIO), "Not supported."),
    "function_call": Field(Only(reason="send tool_calls."), "Not supported."),
}


@dataclass(frozen=True, slots=True)
class Messages:
    def read(self, value: Any, param: str, rules: Rules) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not value:
            raise refuse(param, value, "a list of at least one message")
        check_count(param, len(value), "max_messages", rules)
        return [self._message(message, f"{param}[{place}]", rules) for place, message in enumerate(value)]

    @staticmethod
    def _message(message: Any, param: str, rules: Rules) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise refuse(param, message, "an object with role and content")
        checked = read_fields(message, MESSAGE, rules, within=f"{param}.")
        if "content" not in checked and not (checked["role"] == "assistant" and checked.get("tool_calls")):
            raise RequestError(f"{param}.content is missing.", param=f"{param}.content")
        return checked

    def schema(self, config: Config) -> dict[str, Any]:
        items = fields_schema(MESSAGE, config)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": config.max_messages}


FIELDS: Fields = {
    "messages": Field(Messages(), "The conversation so far.", True),
    **SHARED,
    **SAMPLING,
    "logprobs": Field(Boolean(), "Whether the answer comes with log-probabilities of its tokens."),
    "top_logprobs": Field(Integer(0, "max_logprobs"), "With logprobs: so many alternatives for each token."),
    "add_generation_prompt": Field(
        Boolean(), "Whether the template opens the answer; true, unless continue_final_message is."
    ),
    "continue_final_message": Field(Boolean(), "Whether the answer goes on with the last message."),
    "chat_template_kwargs": Field(
        AnyObject(), "Variables of the template: enable_thinking, and those that --chat_template_kwargs allows."
    ),
    "add_special_tokens": Field(
        Only(False, reason="the chat template writes the special tokens."), "Not supported, unless false."
    ),
    "echo": Field(Only(False, reason="it is a field of /v1/completions."), "Not supported, unless false."),
    "modalities": Field(Only(["text"], reason=_NO_AUDIO), "Text, which is the default."),
    "audio": Field(Only(reason=_NO_AUDIO), "Not supported."),
    "mm_processor_kwargs": Field(Only({}, reason=_NO_AUDIO), "Not supported."),
    "tools": Field(Only([], reason=_NO_TOOLS), "Not supported, unless empty."),
    "tool_choice": Field(Only("none", "auto", reason=_NO_TOOLS), "Not supported, unless none or auto."),
    "parallel_tool_calls": Field(Boolean(), "About tools, which there are none of: it changes nothing."),
    "functions": Field(Only([], reason=_NO_TOOLS), "Not supported, unless empty."),
    "function_call": Field(Only("none", "auto", reason=_NO_TOOLS), "Not supported, unless none or auto."),
    "documents": Field(Only([], reason="put what the model shall read into messages."), "Not supported."),
    "prediction": Field(Only(reason="answers are not predicted."), "Not supported."),
    "reasoning_effort": Field(
        Only(reason="models differ; where the template knows enable_thinking, set it in chat_template_kwargs."),
        "Not supported.",
    ),
    "include_reasoning": Field(Only(True, reason="reasoning is part of the text."), "Not supported, unless true."),
    "verbosity": Field(Only("medium", reason="ask for it in a message."), "Not supported, unless medium."),
    "web_search_options": Field(Only(reason="nothing is fetched from the web."), "Not supported."),
    "prompt": Field(Only(reason="this route takes messages; /v1/completions takes a prompt."), "Not supported."),
}


def read_chat(
    body: dict[str, Any], config: Config, defaults: Mapping[str, Any], *, integral_floats: bool = False
) -> ChatRequest:
    """The request that a body makes, or RequestError. `defaults` are the sampling values that the model recommends."""
    values = read_fields(body, FIELDS, Rules(config, integral_floats))
    sampling = read_sampling(values, config, defaults, logprobs=_logprobs(values))
    check_sequences(sampling.n, 1, config)
    going_on = values.get("continue_final_message", False)
    opening = values.get("add_generation_prompt", not going_on)
    if going_on and opening:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both true; the one opens an answer, the other the "
            "last message.",
            param="continue_final_message",
        )
    return ChatRequest(
        **read_shared(values, config),
        messages=values["messages"],
        sampling=sampling,
        add_generation_prompt=opening,
        continue_final_message=going_on,
        template_kwargs=values.get("chat_template_kwargs", {}),
    )


def openapi(config: Config) -> dict[str, Any]:
    """The JSON Schema of the body."""
    return fields_schema(FIELDS, config)


def _logprobs(values: Mapping[str, Any]) -> int | None:
    count = values.get("top_logprobs", 0)
    if values.get("logprobs"):
        return count
    if count:
        raise RequestError(f"top_logprobs={count} needs logprobs to be true.", param="top_logprobs")
    return None


def _bad_part(part: Any, param: str) -> RequestError:
    if not isinstance(part, dict):
        return refuse(param, part, "an object")
    kind = part.get("type")
    if kind != "text":
        return Unsupported(f"{param}.type is {describe(kind)}; only parts of type 'text' are.", param=f"{param}.type")
    if not isinstance(part.get("text"), str):
        return refuse(f"{param}.text", part.get("text"), "a string")
    other = next(name for name in part if name not in ("type", "text"))
    return Unsupported(f"{param} has {describe(other)}, which is not a field of a text part.", param=param)
