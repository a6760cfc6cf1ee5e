"""The JSON object in a request's body, within bounds that keep the parser quick.

orjson reads it, and with it come its rules: UTF-8 only, no NaN or Infinity, no lone surrogates; of equal keys the last
one counts; an integer beyond 64 bits becomes a float.
"""

import asyncio
from typing import Any

import numpy as np
import orjson

from hex_llm.errors import RequestError, TooLarge

# The parser holds the interpreter while it works. These many take it less than 0.2 s on one slow core.
MAX_CONTAINERS = 131_072
MAX_STRINGS = 524_288
MAX_VALUES = 4_194_304

_THREAD_BYTES = 256 * 2**10
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_KINDS = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


async def read_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """`parse_object`, in a thread where it would hold up the event loop."""
    if len(body) > _THREAD_BYTES:
        return await asyncio.to_thread(parse_object, body, max_depth)
    return parse_object(body, max_depth)


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    if not body or body.isspace():
        raise RequestError("The request body is empty; it must be a JSON object.")
    if body.startswith(_BYTE_ORDER_MARKS):
        raise RequestError("The request body begins with a byte order mark; it must be JSON in UTF-8 without one.")
    _check_structure(body, max_depth)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _why(body, error) from None
    if not isinstance(value, dict):
        raise RequestError(f"The request body must be a JSON object, not {_KINDS[type(value)]}.")
    return value


def _check_structure(body: bytes, max_depth: int) -> None:
    # Nearly every body passes on these counts alone, though they count what is inside strings too.
    containers = body.count(b"[") + body.count(b"{")
    if containers <= max_depth and body.count(b'"') <= 2 * MAX_STRINGS and body.count(b",") <= MAX_VALUES:
        return
    # Both replacements keep the length: they copy once, however many there are.
    unescaped = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    if unescaped.count(b'"') > 2 * MAX_STRINGS:
        raise TooLarge(f"The request body has more than {MAX_STRINGS} strings.")
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    if outside_strings.count(b",") > MAX_VALUES:
        raise TooLarge(f"The request body has more than {MAX_VALUES} values.")
    brackets = outside_strings.translate(None, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise TooLarge(f"The request body has more than {MAX_CONTAINERS} lists and objects.")
    # Of the four brackets in ASCII, those that open are [ and {, with bit 2 clear.
    opens = (np.frombuffer(brackets, np.uint8) & 4) == 0
    depth = int(np.where(opens, 1, -1).cumsum().max(initial=0))
    if depth > max_depth:
        raise RequestError(f"The request body has {depth} lists and objects within each other; {max_depth} may be.")


def _why(body: bytes, error: orjson.JSONDecodeError) -> RequestError:
    try:
        body.decode()
    except UnicodeDecodeError as undecodable:
        return RequestError(f"The request body is not UTF-8: byte {undecodable.start} begins no character.")
    where = f"line {error.lineno}, column {error.colno}"
    return RequestError(f"The request body is not valid JSON; the error is at {where} or after it.")
