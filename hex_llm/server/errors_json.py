"""Errors as clients of OpenAI's API expect them."""

from typing import Any

import orjson

from hex_llm.errors import RequestError, ServerError

MAX_BYTES = 8 * 2**10

_MAX_CHARS = 1000
_RETRY_AFTER_S = 1  # with these statuses: a queue moves on at once, and most of a start is quick
_RETRY_STATUSES = (429, 503)


def error_status(error: BaseException) -> int:
    return error.status if isinstance(error, RequestError | ServerError) else 500


def error_object(error: BaseException, request_id: str | None = None) -> dict[str, Any]:
    """What an answer or an event of a stream holds. An exception that is not ours says only whose request it hit."""
    if isinstance(error, RequestError | ServerError):
        message, kind, param, code = str(error), error.type, error.param, error.code
    else:
        message, kind, param, code = "Internal error.", "server_error", None, "internal_error"
        if request_id:
            message = f"Internal error; the request was {request_id}."
    return {"error": {"message": _cut(message), "type": kind, "param": param and _cut(param, 100), "code": code}}


def error_body(error: BaseException, request_id: str | None = None) -> bytes:
    """At most MAX_BYTES, as JSON needs at most six bytes for a character."""
    return orjson.dumps(error_object(error, request_id))


def error_headers(error: BaseException) -> list[tuple[str, str]]:
    return [("Retry-After", str(_RETRY_AFTER_S))] if error_status(error) in _RETRY_STATUSES else []


def _cut(text: str, limit: int = _MAX_CHARS) -> str:
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    # A lone surrogate, which no message of ours should hold, would make the JSON writer fail.
    return text.encode(errors="replace").decode()
