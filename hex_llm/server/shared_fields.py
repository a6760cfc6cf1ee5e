"""What requests for chats and for completions have in common besides sampling: how to answer, and labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hex_llm.config import Config
from hex_llm.errors import RequestError
from hex_llm.server.adapter_fields import ADAPTER, read_adapter
from hex_llm.server.exchange import REQUEST_ID
from hex_llm.server.fields import AnyObject, Boolean, Field, Fields, Object, Only, Rules, Text, refuse

MAX_LABEL = 256  # characters

_LABEL = Text(at_most=MAX_LABEL)


@dataclass(frozen=True, slots=True)
class RequestId:
    def read(self, value: Any, param: str, rules: Rules) -> str:
        if not isinstance(value, str) or not REQUEST_ID.fullmatch(value):
            raise refuse(param, value, "1 to 128 letters, digits, dots, dashes and underscores")
        return value

    def schema(self, config: Config) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"}


_STREAM_OPTIONS: Fields = {
    "include_usage": Field(Boolean(), "Whether a last chunk of its own has the usage."),
    "continuous_usage_stats": Field(Boolean(), "Whether every chunk has the usage of its answer so far as well."),
    "include_obfuscation": Field(Only(False, reason="chunks are not padded."), "Not supported, unless false."),
}

SHARED: Fields = {
    "model": Field(
        Text(at_most=1024), "A name of the model, or of an adapter. Without it, or empty, the model that is served."
    ),
    **ADAPTER,
    "stream": Field(Boolean(), "Whether the answer comes in pieces, as server-sent events."),
    "stream_options": Field(
        Object(_STREAM_OPTIONS), "With stream. Without it, the last chunk has the usage beside its choice."
    ),
    "cache_salt": Field(Text(at_least=1, at_most=256), "The request finds only prefixes with the same salt."),
    "return_token_ids": Field(Boolean(), "Whether prompt and answers come as tokens, too."),
    "return_tokens_as_token_ids": Field(Boolean(), "Whether logprobs name tokens by id, like token_id:42."),
    "user": Field(_LABEL, "A label: it changes nothing."),
    "request_id": Field(RequestId(), "A name for the request, which the answer's id then has in it."),
    "metadata": Field(AnyObject(), "Labels: they change nothing, and are not kept."),
    "prompt_cache_key": Field(_LABEL, "A label: prefixes are found without it. Keep them apart with cache_salt."),
    "safety_identifier": Field(_LABEL, "A label: it changes nothing."),
    "prompt_cache_retention": Field(
        Only("in_memory", reason="prefixes are kept as long as memory allows."), "Not supported, unless in_memory."
    ),
    "prompt_cache_options": Field(Only({}, reason="every prompt is looked up in the cache."), "Not supported."),
    "store": Field(Only(False, reason="answers are not kept."), "Not supported, unless false."),
    "service_tier": Field(
        Only("auto", "default", reason="all requests are served alike."), "Not supported, unless auto or default."
    ),
    "priority": Field(Only(0, reason="requests are served in the order they come."), "Not supported, unless 0."),
    "moderation": Field(Only(reason="nothing is moderated."), "Not supported."),
    "kv_transfer_params": Field(Only(reason="KV caches are not taken from other servers."), "Not supported."),
    "vllm_xargs": Field(Only({}, reason="there are no such arguments here."), "Not supported."),
    "chat_template": Field(
        Only(reason="a template comes with the model or from --chat_template, never from a request."), "Not supported."
    ),
}


def read_shared(values: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Fields of ChatRequest and of CompletionRequest alike, from checked values."""
    stream = values.get("stream", False)
    options = values.get("stream_options")
    if options is not None and not stream:
        raise RequestError("stream_options is given, but stream is not true.", param="stream_options")
    # OpenAI's rule: a client that sends stream_options gets usage if it asks. Who sends none is told all the same.
    include_usage = None if options is None else options.get("include_usage", False)
    continuous = options is not None and options.get("continuous_usage_stats", False)
    if continuous and not include_usage:
        raise RequestError(
            "stream_options.continuous_usage_stats is true, but stream_options.include_usage is not.",
            param="stream_options.continuous_usage_stats",
        )
    if stream and "prompt_logprobs" in values:
        raise RequestError(
            "prompt_logprobs is given, but stream is true; they come with whole answers only.", param="prompt_logprobs"
        )
    return {
        "model": values.get("model") or None,
        "adapter": read_adapter(values, config),
        "stream": stream,
        "include_usage": include_usage,
        "continuous_usage_stats": continuous,
        "cache_salt": values.get("cache_salt"),
        "return_token_ids": values.get("return_token_ids", False),
        "tokens_as_ids": values.get("return_tokens_as_token_ids", False),
        "prompt_logprobs": values.get("prompt_logprobs"),
        "request_id": values.get("request_id"),
    }
