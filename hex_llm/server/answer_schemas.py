"""What the server answers with, as JSON Schema: by route, and for each the types of content that a 200 may have."""

from typing import Any

from hex_llm.server.card import PATH as CARD

type Schema = dict[str, Any]

ERROR = "#/components/schemas/Error"

_TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_NULL: Schema = {"type": "null"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _object(members: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """With these members and no others."""
    return {
        "type": "object",
        "properties": members | (optional or {}),
        "required": list(members),
        "additionalProperties": False,
    }


_TOKENS = _list(_INTEGER)
_COUNT: Schema = {"type": "integer", "minimum": 0}

ERROR_SCHEMA = _object(
    {"error": _object({"message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": _or_null(_TEXT)})}
)

_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    }
)
_ENDING = {
    "finish_reason": {"enum": ["stop", "length"]},
    "stop_reason": {"type": ["integer", "string", "null"]},  # the token or the text that ended it
}
_PROMPT_LOGPROBS = _list(
    _or_null(
        {
            "type": "object",
            "additionalProperties": _object({"logprob": _NUMBER, "rank": _INTEGER, "decoded_token": _TEXT}),
        }
    )
)
_CHAT_ENTRY = {"token": _TEXT, "logprob": _NUMBER, "bytes": _TOKENS}
_CHAT_LOGPROBS = _object(
    {"content": _list(_object({**_CHAT_ENTRY, "top_logprobs": _list(_object(_CHAT_ENTRY))})), "refusal": _NULL}
)
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _list(_TEXT),
        "token_logprobs": _list(_or_null(_NUMBER)),
        "top_logprobs": _list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
        "text_offset": _list(_COUNT),
    }
)


def _answer(kind: str, choice: Schema, optional: dict[str, Schema] | None = None) -> Schema:
    head = {"id": _TEXT, "object": {"const": kind}, "created": _INTEGER, "model": _TEXT}
    return _object({**head, "choices": _list(choice), "usage": _USAGE}, optional)


_CHAT = _answer(
    "chat.completion",
    _object(
        {
            "index": _COUNT,
            "message": _object({"role": {"const": "assistant"}, "content": _TEXT, "refusal": _NULL}),
            "logprobs": _or_null(_CHAT_LOGPROBS),
            **_ENDING,
        },
        {"token_ids": _TOKENS},
    ),
    {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _TOKENS},
)
_COMPLETION = _answer(
    "text_completion",
    _object(
        {"index": _COUNT, "text": _TEXT, "logprobs": _or_null(_COMPLETION_LOGPROBS), **_ENDING},
        {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _TOKENS, "token_ids": _TOKENS},
    ),
)
_PREDICTIONS = _object(
    {"predictions": _list(_TEXT)}, {"output_token_counts": _list(_COUNT), "cumulative_logprobs": _list(_NUMBER)}
)
_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _INTEGER,
        "owned_by": _TEXT,
        "root": _TEXT,
        "parent": _or_null(_TEXT),
        "max_model_len": _COUNT,
    }
)
_STATUS: Schema = {"type": "object", "properties": {"status": _TEXT}, "required": ["status"]}

_JSON, _EVENTS, _BYTES = "application/json", "text/event-stream", "application/octet-stream"
_HTML, _PLAIN = "text/html", "text/plain"

ANSWERS: dict[str, dict[str, Schema]] = {
    "/v1/chat/completions": {_JSON: _CHAT, _EVENTS: _TEXT},
    "/v1/completions": {_JSON: _COMPLETION, _EVENTS: _TEXT},
    "/generate": {
        _JSON: {
            "anyOf": [_PREDICTIONS, _CHAT, _object({"predictions": {"anyOf": [_CHAT, _list(_CHAT)]}})],
            "description": "With streaming_tokens and without stream: one such object for each piece.",
        },
        _EVENTS: _TEXT,
        _BYTES: {"type": "string", "format": "binary"},
    },
    "/tokenize": {
        _JSON: _object(
            {"count": _COUNT, "max_model_len": _COUNT, "tokens": _TOKENS, "token_strs": _or_null(_list(_TEXT))}
        )
    },
    "/detokenize": {_JSON: _object({"prompt": _TEXT})},
    "/v1/models": {_JSON: _object({"object": {"const": "list"}, "data": _list(_MODEL)})},
    "/v1/models/{id}": {_JSON: _MODEL},
    "/ping": {_JSON: _STATUS},
    "/health": {_JSON: _STATUS},
    "/live": {_JSON: _STATUS},
    "/version": {_JSON: _object({"version": _TEXT})},
    "/metrics": {_PLAIN: _TEXT},
    "/": {_HTML: _TEXT},
    CARD: {_JSON: {"type": "object"}},
    "/docs": {_HTML: _TEXT},
    "/openapi.json": {_JSON: {"type": "object"}},
}
