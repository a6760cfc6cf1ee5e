"""Requests with bodies that were good once. A number tells which: the same one is always the same request."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hex_llm.config import Config
from hex_llm.server import chat_schema, completion_schema, tokens, vertex_schema
from hex_llm.server.fields import fields_schema
from tests.faults.legal_values import legal_value
from tests.faults.valid_bodies import BODIES, FLAGS
from tests.server.bad_inputs.case import CHAT, COMPLETIONS, DETOKENIZE, GENERATE, TOKENIZE

_TABLES = {
    CHAT: chat_schema.FIELDS,
    COMPLETIONS: completion_schema.FIELDS,
    GENERATE: vertex_schema.FIELDS,
    TOKENIZE: tokens.TOKENIZE,
    DETOKENIZE: tokens.DETOKENIZE,
}
_SCHEMAS = {route: fields_schema(table, Config.from_args(FLAGS))["properties"] for route, table in _TABLES.items()}
# A field that some route declares is tried on all of them.
_NAMES = sorted(
    {name for table in _TABLES.values() for name in table}
    | {*chat_schema.MESSAGE, "instances", "parameters", "@requestFormat", "include_usage"}
)
_NUMBERS = (
    0, 1, -1, 2, 3, 5, 20, 21, 128, 129, 319, 320, 0.5, -0.0, 1.0, 2.5, 5e-324, 1e-300, 1e-45, 1e-38, 1e38, 3.5e38,
    1e308, -1e308, 2**31 - 1, 2**31, 2**32, 2**32 + 5, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63),
    -(2**63) - 1, 10**25, -(10**40), float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
_STRINGS = (
    "", " ", "a", "hi", "0", "1", "-1", "1.5", "true", "null", "NaN", "\0", "\n", "\\", '"', "é", "漢字", "🙂", "ß",
    "İ", "👩\u200d👩\u200d👧", "e\u0301\u0301\u0301", "\u202eabc", "\ufeff", "\ufffd", "\uffff", "\U0010ffff",
    "\ud800", "\udfff", "<s>", "</s>", "<pad>", "{{ 7*7 }}", "{% raw %}", "%n%s", "../../etc/passwd", "gs://bucket/a",
    "http://127.0.0.1/", "user", "tool", "robot", "chatCompletions", "text", "json_object", "auto", "__class__",
    "[hex-llm:continue-here] ",
)  # fmt: skip
_BYTES = (
    b"{", b"}", b"[", b"]", b'"', b"'", b",", b":", b"\\", b"\\u", b"\\ud800", b"\0", b"\xff", b"\xc0\x80",
    b"\xed\xa0\x80", b"\xef\xbb\xbf", b"NaN", b"-Infinity", b"1e999", b"null", b"true", b" ", b"\n", b"-", b"0",
    b"9" * 30, b"/*", b"e", b".",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """A request. `good` is whether it must be answered with 200; `whole`, whether it ends where its head says, so that
    the connection can be used again.
    """

    number: int
    route: str
    head: bytes
    body: bytes
    good: bool = False
    whole: bool = True


def mutant(number: int, seed: int = 0) -> Mutant:
    rng = random.Random(f"{seed} {number}")
    route, body = copy.deepcopy(rng.choice(BODIES))
    kind = rng.random()
    if kind < 0.06:
        return _sent(number, rng, route, _unharmed(rng, route, body), good=True)
    if kind < 0.36:
        return _sent(number, rng, route, _text(rng, _varied(rng, route, body)))
    if kind < 0.7:
        return _sent(number, rng, route, _text(rng, _changed(rng, body)))
    if kind < 0.92:
        if rng.random() < 0.3:
            body = _changed(rng, body)
        return _sent(number, rng, route, _damaged(rng, _text(rng, body)))
    return _missent(number, rng, route, _text(rng, body))


def mutants(count: int, seed: int = 0) -> Iterator[Mutant]:
    return (mutant(number, seed) for number in range(count))


def _text(rng: random.Random, body: Any) -> bytes:
    separators = rng.choice(((",", ":"), (", ", ": "), (" ,\t", "\n: ")))
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5, separators=separators)
    return text.encode(errors="surrogatepass")


def _unharmed(rng: random.Random, route: str, body: dict[str, Any]) -> bytes:
    """The same request in other words."""
    members = list(body.items())
    if route in (CHAT, COMPLETIONS) and rng.random() < 0.5:
        names = [name for name in rng.sample(sorted(_TABLES[route]), 3) if name not in body]
        members += [(name, None) for name in names]
    rng.shuffle(members)
    return rng.choice((b"", b" ", b"\r\n")) + _text(rng, dict(members)) + rng.choice((b"", b"\n", b"  "))


def _varied(rng: random.Random, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """With other values, each of which is allowed: most such requests are good, and some contradict themselves."""
    targets = body.get("instances") or [body]
    for _ in range(rng.choice((1, 1, 2, 3))):
        target = rng.choice(targets)
        table = CHAT if "@requestFormat" in target else route
        name = rng.choice(sorted(_SCHEMAS[table]))
        target[name] = legal_value(rng, _SCHEMAS[table][name])
    return body


def _changed(rng: random.Random, body: Any) -> Any:
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        slots = list(_slots(body))
        if not slots:
            break
        change = rng.choice(_CHANGES)
        change(rng, *rng.choice(slots))
    if rng.random() < 0.2 and isinstance(body, dict):
        body[rng.choice(_NAMES)] = _odd(rng)
    if rng.random() < 0.1 and isinstance(body, dict):
        body |= copy.deepcopy(rng.choice(BODIES)[1])
    if rng.random() < 0.02:
        body = rng.choice(([body], {"instances": body}, {"instances": [body]}, {"body": body}, None, 5, "x", []))
    return body


def _slots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a body with each of its keys or places."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _slots(value[key])


def _odd(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(_NUMBERS)
    if kind < 0.65:
        return rng.choice(_STRINGS)
    if kind < 0.75:
        return rng.choice((None, True, False))
    if kind < 0.8:
        return rng.choice(_STRINGS[1:]) * rng.choice((50, 300, 1025, 5000))
    if kind < 0.82:
        return [rng.choice((5, "a", [], {}))] * rng.choice((5, 129, 1025, 4097))
    return rng.choice(([], {}, [[]], [None], [{}], {"": None}, {"a": 1}, [1, 2, 3], ["a", "b"], [[5], [6]], [5, "a"],
                       {"5": 1}, {"type": "text", "text": "a"}, [{"role": "user", "content": ""}]))  # fmt: skip


def _replace(rng: random.Random, container: Any, key: Any) -> None:
    container[key] = _odd(rng)


def _delete(rng: random.Random, container: Any, key: Any) -> None:
    del container[key]


def _repeat(rng: random.Random, container: Any, key: Any) -> None:
    value = container[key]
    if isinstance(value, list | str):
        container[key] = value * rng.choice((2, 3, 5, 40, 200))
    else:
        container[key] = [copy.deepcopy(value) for _ in range(rng.choice((1, 2, 5, 130)))]


def _rename(rng: random.Random, container: Any, key: Any) -> None:
    if isinstance(container, dict):
        name = rng.choice((key.upper(), f"{key}s", f" {key}", key[:-1], rng.choice(_NAMES), rng.choice(_STRINGS)))
        container[name] = container.pop(key)


def _nest(rng: random.Random, container: Any, key: Any) -> None:
    value = container[key]
    for _ in range(rng.choice((1, 1, 2, 5, 90, 99, 120))):
        value = [value] if rng.random() < 0.5 else {rng.choice(_NAMES): value}
    container[key] = value


def _swap(rng: random.Random, container: Any, key: Any) -> None:
    others = list(container) if isinstance(container, dict) else range(len(container))
    other = rng.choice(list(others))
    container[key], container[other] = container[other], container[key]


def _add(rng: random.Random, container: Any, key: Any) -> None:
    if isinstance(container, dict):
        container[rng.choice((*_NAMES, *_STRINGS))] = _odd(rng)
    else:
        container.insert(key, _odd(rng))


def _nudge(rng: random.Random, container: Any, key: Any) -> None:
    """A value of the same type, as a rule."""
    match container[key]:
        case bool() as value:
            container[key] = not value
        case int() | float() as value:
            container[key] = rng.choice(
                (value + 1, -value, value * 1e9, value / 3, float(value), str(value), value * 2)
            )
        case str() as value:
            place = rng.randint(0, len(value))
            container[key] = value[:place] + rng.choice(_STRINGS) + value[place:]
        case list() as value:
            rng.shuffle(value)
        case _:
            container[key] = _odd(rng)


_CHANGES: tuple[Callable[[random.Random, Any, Any], None], ...] = (
    _replace, _replace, _replace, _nudge, _nudge, _nudge, _delete, _repeat, _rename, _nest, _swap, _add, _add,
)  # fmt: skip


def _damaged(rng: random.Random, text: bytes) -> bytes:
    data = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        place = rng.randint(0, len(data))
        size = rng.choice((1, 2, 5, 20))
        match rng.randrange(6):
            case 0 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                del data[place : place + size]
            case 2:
                data[place:place] = rng.choice(_BYTES) * rng.choice((1, 1, 1, 2, 150))
            case 3:
                data[place:place] = data[place : place + size]
            case 4:
                data[place : place + size] = rng.randbytes(size)
            case _ if rng.random() < 0.3:
                del data[place:]
    return bytes(data)


def _sent(number: int, rng: random.Random, route: str, body: bytes, *, good: bool = False) -> Mutant:
    """In a proper request, be it with a length or in chunks."""
    if rng.random() < 0.9:
        return Mutant(number, route, _head(route, f"Content-Length: {len(body)}"), body, good)
    return Mutant(number, route, _head(route, "Transfer-Encoding: chunked"), _chunks(rng, body), good)


def _missent(number: int, rng: random.Random, route: str, body: bytes) -> Mutant:
    """A good body in a request that is odd or broken."""
    length = f"Content-Length: {len(body)}"
    match rng.randrange(6):
        case 0:
            kind = rng.choice(
                ("text/plain", "application/xml", "application/json; charset=latin-1", "*/*", "json", "/")
            )
            return Mutant(number, route, _head(route, length, kind=kind), body)
        case 1:
            odd = rng.choice(("X-Request-Id: ../\t;", "Expect: 100-continue", "Accept: text/html", "Connection: close",
                              "Authorization: Basic x", "Cookie: a=b", "X-Request-Id: " + "a" * 500))  # fmt: skip
            return Mutant(number, route, _head(route, length, odd), body, good=True)
        case 2:
            encoding = rng.choice(("gzip", "br", "deflate", "x", "identity, gzip"))
            return Mutant(number, route, _head(route, length, f"Content-Encoding: {encoding}"), body)
        case 3:
            bad = rng.choice((f"{length}, 1", "Content-Length: -1", "Content-Length: x", "Transfer-Encoding: gzip",
                              f"{length}\r\nContent-Length: 1", f"{length}\r\nTransfer-Encoding: chunked"))  # fmt: skip
            return Mutant(number, route, _head(route, bad), body, whole=False)
        case 4:
            chunks = _damaged(rng, _chunks(rng, body))
            return Mutant(number, route, _head(route, "Transfer-Encoding: chunked"), chunks, whole=False)
        case _:
            # One that is too short for what it says is never complete; the server has to give up on it.
            wrong = len(body) + rng.choice((-1, -5, 1, 100) if rng.random() < 0.2 else (-1, -5))
            return Mutant(number, route, _head(route, f"Content-Length: {max(wrong, 0)}"), body, whole=False)


def _head(route: str, *headers: str, kind: str = "application/json") -> bytes:
    lines = [f"POST {route} HTTP/1.1", "Host: a", f"Content-Type: {kind}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def _chunks(rng: random.Random, body: bytes) -> bytes:
    parts, place = [], 0
    while place < len(body):
        part = body[place : place + rng.choice((1, 7, 50, 5000))] if len(body) < 10_000 else body[place:]
        parts.append(b"%x\r\n%b\r\n" % (len(part), part))
        place += len(part)
    return b"".join(parts) + b"0\r\n\r\n"
