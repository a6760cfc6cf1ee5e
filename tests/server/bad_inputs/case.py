"""A request that the server must refuse, and what it must say."""

import json
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

KEY = "a-key-for-bad-inputs"
AUTHORIZED = f"Authorization: Bearer {KEY}"
JSON_TYPE = "Content-Type: application/json"

# What each case of a class changes one thing of.
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_BODY = {"messages": MESSAGES, "max_tokens": 2}
COMPLETION_BODY = {"prompt": "hi", "max_tokens": 2}
INSTANCE = {"prompt": "hi", "max_tokens": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`says` is in the message: the value that is refused, or the limit. A `body` that is not bytes is sent as JSON.

    `pieces`, where there are any, are all that is sent, with `pause_s` after each.
    """

    name: str
    route: str = CHAT
    body: Any = b""
    says: str
    param: str | None = None
    code: str | None = None
    status: int = 400
    type: str = "invalid_request_error"
    method: str = "POST"
    headers: tuple[str, ...] = (AUTHORIZED, JSON_TYPE)
    pieces: tuple[bytes, ...] = ()
    pause_s: float = 0.0
    answer_headers: tuple[tuple[str, str], ...] = ()

    @property
    def request(self) -> tuple[bytes, ...]:
        if self.pieces:
            return self.pieces
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        length = (f"Content-Length: {len(body)}",) if body or self.method == "POST" else ()
        return (head(self.method, self.route, *self.headers, *length) + body,)


def head(method: str, target: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: a", *headers, "", ""]).encode("latin-1")


def chat(name: str, param: str | None, says: str, code: str | None = None, /, **fields: Any) -> Case:
    """A chat with these fields."""
    return Case(name=name, body=CHAT_BODY | fields, param=param, says=says, code=code)


def completion(name: str, param: str | None, says: str, code: str | None = None, /, **fields: Any) -> Case:
    return Case(name=name, route=COMPLETIONS, body=COMPLETION_BODY | fields, param=param, says=says, code=code)


def instance(name: str, param: str | None, says: str, code: str | None = None, /, **fields: Any) -> Case:
    """A single instance for /generate with these fields; the param is within it."""
    body = {"instances": [INSTANCE | fields]}
    full = f"instances[0].{param}" if param else "instances[0]"
    return Case(name=name, route=GENERATE, body=body, param=full, says=says, code=code)
