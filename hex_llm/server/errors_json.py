"""Errors as clients of OpenAI's API expect them."""

from typing import Any

import orjson

from hex_llm.errors import RequestError, ServerError

MAX_BYTES = 8 * 2**10

_MAX_CHARS = 1000
_RETRY_AFTER_S = 1  # with these statuses: a queue moves on at once, and most of a start is quick
_RETRY_STATUSES = (429, 503)


def told(error: BaseException, request_id: str) -> RequestError | ServerError:
    """An error as the client is told of it. Of a fault of ours it learns nothing but whose request it hit."""
    if isinstance(error, RequestError | ServerError) and error.code != ServerError.code:
        return error
    return ServerError(f"Internal error. Request {request_id}.")


def error_object(error: RequestError | ServerError) -> dict[str, Any]:
    """What an answer or an event of a stream holds."""
    param = error.param and _cut(error.param, 100)
    return {"error": {"message": _cut(str(error)), "type": error.type, "param": param, "code": error.code}}


def error_body(error: RequestError | ServerError) -> bytes:
    """At most MAX_BYTES, as JSON needs at most six bytes for a character."""
    return orjson.dumps(error_object(error))


def error_headers(error: RequestError | ServerError) -> list[tuple[str, str]]:
    return [("Retry-After", str(_RETRY_AFTER_S))] if error.status in _RETRY_STATUSES else []


def _cut(text: str, limit: int = _MAX_CHARS) -> str:
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    # A lone surrogate, which no message of ours should hold, would make the JSON writer fail.
    return text.encode(errors="replace").decode()
