"""Requests that are wrong before their body is looked at: HTTP itself, keys, paths and methods, slow clients."""

from typing import Any

from tests.server.bad_inputs.case import (
    AUTHORIZED,
    CHAT,
    COMPLETION_BODY,
    COMPLETIONS,
    DETOKENIZE,
    GENERATE,
    JSON_TYPE,
    KEY,
    TOKENIZE,
    Case,
    head,
)

CHUNKED = "Transfer-Encoding: chunked"
_GOOD = b'{"prompt": "hi", "max_tokens": 2}'


def raw(name: str, sent: bytes, status: int = 400, says: str = "not valid HTTP/1.1", **more: Any) -> Case:
    return Case(name=name, pieces=(sent,), status=status, says=says, **more)


def post(*headers: str, body: bytes = b"") -> bytes:
    return head("POST", COMPLETIONS, AUTHORIZED, *headers) + body


def typed(name: str, kind: str, says: str) -> Case:
    return Case(name=name, route=COMPLETIONS, body=COMPLETION_BODY, headers=(AUTHORIZED, f"Content-Type: {kind}"),
                status=415, code="unsupported_media_type", says=says)  # fmt: skip


def encoded(name: str, encoding: str) -> Case:
    return Case(name=name, route=COMPLETIONS, body=COMPLETION_BODY, status=415, code="unsupported_media_type",
                headers=(AUTHORIZED, JSON_TYPE, f"Content-Encoding: {encoding}"), says=encoding)  # fmt: skip


def unauthorized(name: str, says: str, *headers: str, route: str = COMPLETIONS) -> Case:
    return Case(name=name, route=route, body=COMPLETION_BODY, headers=(JSON_TYPE, *headers), status=401,
                code="invalid_api_key", says=says, answer_headers=(("www-authenticate", "Bearer"),))  # fmt: skip


def wrong_method(method: str, route: str, allow: str) -> Case:
    return Case(name=f"{method} on {route}", route=route, method=method, headers=(AUTHORIZED,), status=405,
                code="method_not_allowed", says=allow, answer_headers=(("allow", allow),))  # fmt: skip


def no_path(name: str, route: str, says: str, method: str = "GET") -> Case:
    return Case(name=name, route=route, method=method, status=404, code="not_found", says=says)


def slow(name: str, pause_s: float, says: str, *pieces: bytes) -> Case:
    return Case(name=name, pieces=pieces, pause_s=pause_s, status=408, code="request_timeout", says=says)


WIRE = (
    raw("bytes that are no HTTP", b"\x00\x01\x02\x03\r\n\r\n"),
    raw("the first words of TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    raw("a line without a version", b"GET /ping\r\n\r\n"),
    raw("a version of the far future", b"GET /ping HTTP/9.9\r\nHost: a\r\n\r\n", says="HTTP/9.9"),
    raw("the second version of HTTP in the words of the first", b"GET /ping HTTP/2.0\r\nHost: a\r\n\r\n",
        says="HTTP/2.0"),
    raw("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", says="HTTP"),
    raw("no host", b"GET /ping HTTP/1.1\r\n\r\n"),
    raw("two hosts", head("GET", "/ping", "Host: b")),
    raw("a header without a colon", head("GET", "/ping", "nothing")),
    raw("a space before a colon", head("GET", "/ping", "A : b")),
    raw("a NUL in a header", head("GET", "/ping", "A: b\0c")),
    raw("a header that goes on with nothing before it", b"GET /ping HTTP/1.1\r\n folded\r\nHost: a\r\n\r\n"),
    raw("a path with bytes beyond ASCII", b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n"),
    raw("a method with a bracket", b"GE[T /ping HTTP/1.1\r\nHost: a\r\n\r\n"),
    raw("a header of three hundred thousand bytes", head("GET", "/ping", "A: " + "x" * 300_000), 431, "65536 bytes",
        code="headers_too_large"),
    raw("a key of a hundred thousand bytes", head("GET", "/version", "Authorization: Bearer " + "x" * 100_000), 431,
        "65536 bytes", code="headers_too_large"),
    raw("a path of a hundred thousand bytes", head("GET", "/" + "x" * 100_000), 431, "65536 bytes",
        code="headers_too_large"),
    raw("five thousand headers", head("GET", "/ping", *["A: b"] * 5000), 431, "256 headers", code="headers_too_large"),
    raw("one header too many", head("GET", "/ping", *[f"A{i}: b" for i in range(256)]), 431, "256 headers",
        code="headers_too_large"),
    raw("a length below zero", post("Content-Length: -1")),
    raw("a length in words", post("Content-Length: ten")),
    raw("a length with a plus", post("Content-Length: +33", body=_GOOD)),
    raw("two lengths that differ", post("Content-Length: 33", "Content-Length: 3", body=_GOOD)),
    raw("a list of lengths", post("Content-Length: 33, 3", body=_GOOD)),
    raw("a length and chunks", post("Content-Length: 33", CHUNKED, body=b"0\r\n\r\n"),
        says="both Content-Length and Transfer-Encoding"),
    raw("a length of one byte more than the limit", post(JSON_TYPE, f"Content-Length: {2**24 + 1}"), 413, "16777216",
        code="content_too_large"),
    raw("a length of a terabyte", post(JSON_TYPE, f"Content-Length: {2**40}"), 413, "1099511627776",
        code="content_too_large"),
    raw("a body in chunks beyond the limit",
        post(JSON_TYPE, CHUNKED, body=17 * (b"100000\r\n" + b" " * 2**20 + b"\r\n") + b"0\r\n\r\n"), 413, "16777216",
        code="content_too_large"),
    raw("more than sixty-five thousand chunks", post(JSON_TYPE, CHUNKED, body=b"1\r\n \r\n" * 65_600 + b"0\r\n\r\n"),
        413, "65536 chunks", code="content_too_large"),
    raw("a transfer in gzip", post("Transfer-Encoding: gzip", body=b"0\r\n\r\n")),
    raw("a transfer in gzip and chunks", post("Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n")),
    raw("two transfer encodings", post(CHUNKED, CHUNKED, body=b"0\r\n\r\n")),
    raw("a chunk with a size in words", post(JSON_TYPE, CHUNKED, body=b"zz\r\nabc\r\n0\r\n\r\n")),
    raw("a chunk with a size below zero", post(JSON_TYPE, CHUNKED, body=b"-1\r\na\r\n0\r\n\r\n")),
    raw("a chunk of a size beyond 64 bits", post(JSON_TYPE, CHUNKED, body=b"f" * 30 + b"\r\n")),
    raw("a chunk longer than it says", post(JSON_TYPE, CHUNKED, body=b"1\r\nabc\r\n0\r\n\r\n")),
    raw("chunks in HTTP/1.0", b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        says="HTTP/1.0"),
    raw("a good body in chunks that is bad JSON", post(JSON_TYPE, CHUNKED, body=b"5\r\n{\"a\":\r\n0\r\n\r\n"),
        says="not valid JSON"),
    raw("a body shorter than its length by half a character",
        post(JSON_TYPE, "Content-Length: 13", body=b'{"prompt":"\xf0"}'), says="not UTF-8"),
    typed("a body that says it is a form", "application/x-www-form-urlencoded", "x-www-form-urlencoded"),
    typed("a body that says it is text", "text/plain", "'text/plain'"),
    typed("a body that says it has parts", "multipart/form-data; boundary=a", "multipart/form-data"),
    typed("a body that says it is pickled", "application/x-pickle", "application/x-pickle"),
    typed("a body in another character set", "application/json; charset=utf-16", "utf-16"),
    typed("a content type without a name", "", "''"),
    typed("a content type of ten thousand characters", "x" * 10_000, "xxxx"),
    encoded("a body in gzip", "gzip"),
    encoded("a body in brotli", "br"),
    encoded("a body in an encoding that nobody knows", "rot13"),
    encoded("a body in two encodings", "gzip, deflate"),
)  # fmt: skip

_NEEDED, _FORM, _UNKNOWN = "An API key is needed", "'Bearer KEY'", "not one of this server's"

KEYS = (
    unauthorized("no key", _NEEDED),
    unauthorized("no key for a chat", _NEEDED, route=CHAT),
    unauthorized("no key for a path that does not exist", _NEEDED, route="/admin"),
    unauthorized("no key for a question about a model", _NEEDED, route="/v1/models/tiny"),
    unauthorized("an empty header for the key", _NEEDED, "Authorization: "),
    unauthorized("a scheme without a key", _UNKNOWN, "Authorization: Bearer"),
    unauthorized("a key without a scheme", _FORM, f"Authorization: {KEY}"),
    unauthorized("a key in the basic scheme", _FORM, f"Authorization: Basic {KEY}"),
    unauthorized("a key in a scheme that nobody knows", _FORM, f"Authorization: Token {KEY}"),
    unauthorized("another key", _UNKNOWN, "Authorization: Bearer sk-1234"),
    unauthorized("the beginning of the key", _UNKNOWN, f"Authorization: Bearer {KEY[:-1]}"),
    unauthorized("the key and one letter more", _UNKNOWN, f"Authorization: Bearer {KEY}x"),
    unauthorized("the key in capitals", _UNKNOWN, f"Authorization: Bearer {KEY.upper()}"),
    unauthorized("the key in quotes", _UNKNOWN, f'Authorization: Bearer "{KEY}"'),
    unauthorized("a key with letters beyond ASCII", _UNKNOWN, "Authorization: Bearer clé-ÿ"),
    unauthorized("a key of sixty thousand letters", _UNKNOWN, "Authorization: Bearer " + "k" * 60_000),
    unauthorized("two headers for the key", _UNKNOWN, AUTHORIZED, AUTHORIZED),
    unauthorized("the key in another header", _NEEDED, f"X-Api-Key: {KEY}"),
    unauthorized("the key in a cookie", _NEEDED, f"Cookie: Authorization=Bearer {KEY}"),
    unauthorized("the key in the query", _NEEDED, route=f"{COMPLETIONS}?api_key={KEY}"),
    unauthorized("the key in the query by another name", _NEEDED, route=f"{COMPLETIONS}?key={KEY}&access_token={KEY}"),
)

METHODS = (
    *(wrong_method("GET", route, "POST") for route in (CHAT, COMPLETIONS, GENERATE, TOKENIZE, DETOKENIZE)),
    *(wrong_method("POST", route, "GET") for route in ("/v1/models", "/v1/models/tiny", "/ping", "/metrics")),
    wrong_method("POST", "/version", "GET"),
    wrong_method("PUT", CHAT, "POST"),
    wrong_method("DELETE", "/v1/models/tiny", "GET"),
    wrong_method("PATCH", GENERATE, "POST"),
    wrong_method("OPTIONS", CHAT, "POST"),
    wrong_method("TRACE", "/health", "GET"),
    wrong_method("BREW", "/live", "GET"),
    no_path("the folder of the playground", "/playground/", "There is no /playground/"),
    no_path("a path that does not exist", "/v1/engines", "/v1/engines"),
    no_path("a path that does not exist to post to", "/v1/embeddings", "/v1/embeddings", "POST"),
    no_path("a question about no model", "/v1/models/", "missing"),
    no_path("a path in capitals", "/V1/Models", "/V1/Models"),
    no_path("a path with a slash too many", "//v1/models", "//v1/models"),
    no_path("a path with a slash at its end", "/ping/", "/ping/"),
    no_path("a path out of the tree", "/../../etc/passwd", "etc/passwd"),
    no_path("a path out of the tree in percents", "/%2e%2e/%2e%2e/etc/passwd", "etc/passwd"),
    no_path("a path of five thousand letters", "/" + "p" * 5000, "ppp"),
    no_path("documentation that is switched off", "/docs", "/docs"),
    no_path("a schema that is switched off", "/openapi.json", "/openapi.json"),
    no_path("a route of administrators", "/admin/shutdown", "/admin/shutdown", "POST"),
    no_path("adapters to be loaded", "/v1/load_lora_adapter", "/v1/load_lora_adapter", "POST"),
)  # fmt: skip

# The server of these tests has 1.5 s for a head, and as much for a body.
SLOW = (
    slow("a head that stops in its first line", 0.0, "1.5 seconds", b"POST /v1/comp"),
    slow("a head that stops between two headers", 0.0, "1.5 seconds", b"GET /ping HTTP/1.1\r\nHost: a\r\n"),
    slow("a head of a byte now and then", 0.3, "1.5 seconds", *(bytes([each]) for each in b"GET /ping")),
    slow("a body that never comes", 0.0, "0 bytes", post(JSON_TYPE, "Content-Length: 33")),
    slow("a body that stops", 0.0, "9 bytes", post(JSON_TYPE, "Content-Length: 33", body=_GOOD[:9])),
    slow("a body of a byte now and then", 0.3, "bytes of the request body",
         post(JSON_TYPE, "Content-Length: 33"), *(bytes([each]) for each in _GOOD[:8])),
    slow("chunks that stop", 0.0, "5 bytes", post(JSON_TYPE, CHUNKED, body=b'5\r\n{"a":\r\n')),
)  # fmt: skip

CASES = (*WIRE, *KEYS, *METHODS, *SLOW)
