"""Errors as clients of OpenAI's API expect them."""

from typing import Any

import orjson

from hex_llm.errors import RequestError, ServerError

MAX_BYTES = 8 * 2**10

_MAX_CHARS = 1000
# Seconds until another try makes sense: a queue moves on at once, a server that starts or ends takes longer.
_RETRY_AFTER = {429: 1, 503: 5}


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
    seconds = _RETRY_AFTER.get(error_status(error))
    return [("Retry-After", str(seconds))] if seconds else []


def _cut(text: str, limit: int = _MAX_CHARS) -> str:
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    # A lone surrogate, which no message of ours should hold, would make the JSON writer fail.
    return text.encode(errors="replace").decode()
