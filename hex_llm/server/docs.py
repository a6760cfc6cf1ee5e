"""/docs and /openapi.json: the routes and their fields, from the declarations that requests are read by."""

from collections.abc import Callable, Iterator
from html import escape
from typing import Any, NamedTuple

import orjson

from hex_llm.config import Config
from hex_llm.server import card, chat_schema, completion_schema, tokens, vertex_schema
from hex_llm.server.answer_schemas import ANSWERS, ERROR, ERROR_SCHEMA
from hex_llm.server.exchange import Exchange
from hex_llm.server.fields import Field, Fields
from hex_llm.server.state import Server
from hex_llm.version import __version__

_MAX_VALUES = 160  # characters of a schema that the page shows

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { margin-top: 2.5rem; } h2 code { font-size: 1em; } code { font-size: 0.875em; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; } td:first-child { white-space: nowrap; }
td, th { text-align: left; vertical-align: top; padding: 0.3rem 0.6rem; border-top: 1px solid #ddd; }
"""
_HEADERS = (("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"),)


class Operation(NamedTuple):
    method: str
    path: str
    summary: str
    fields: Fields | None = None  # of the body
    schema: Callable[[Config], dict[str, Any]] | None = None


OPERATIONS = (
    Operation("POST", "/v1/chat/completions", "An answer to a conversation.", chat_schema.FIELDS, chat_schema.openapi),
    Operation(
        "POST", "/v1/completions", "Texts that go on with prompts.", completion_schema.FIELDS, completion_schema.openapi
    ),
    Operation(
        "POST",
        "/generate",
        'Vertex\'s predict route: {"instances": [...], "parameters": {...}}, or the fields of one instance.',
        vertex_schema.FIELDS,
        vertex_schema.openapi,
    ),
    Operation("POST", "/tokenize", "A text or a conversation as tokens.", tokens.TOKENIZE, tokens.tokenize_openapi),
    Operation("POST", "/detokenize", "Tokens as a text.", tokens.DETOKENIZE, tokens.detokenize_openapi),
    Operation("GET", "/v1/models", "The model, under each of its names, and the adapters that have one."),
    Operation("GET", "/v1/models/{id}", "The model, under one of its names, or an adapter."),
    Operation("GET", "/ping", "200 where requests are served, else 503 and why not. Needs no key."),
    Operation("GET", "/health", "The same as /ping."),
    Operation("GET", "/live", "200 wherever the server can answer at all. Needs no key."),
    Operation("GET", "/version", "The version of the server."),
    Operation("GET", "/metrics", "What Prometheus reads."),
    Operation("GET", "/", "The playground, a page to try the model with. Needs no key."),
    Operation("GET", card.PATH, "What the playground shows of the model, and the limits of what it asks for."),
    Operation("GET", "/docs", "This list, for people."),
    Operation("GET", "/openapi.json", "This list, for programs."),
)


def operations(config: Config) -> Iterator[Operation]:
    """Those that there are with these settings."""
    return (each for each in OPERATIONS if config.playground or each.path not in ("/", card.PATH))


async def page(server: Server, exchange: Exchange) -> None:
    body = "".join(_html(server.config)).encode()
    await exchange.reply(200, body, content_type="text/html; charset=utf-8", headers=_HEADERS)


async def openapi(server: Server, exchange: Exchange) -> None:
    await exchange.reply(200, orjson.dumps(describe_api(server.config)))


def describe_api(config: Config) -> dict[str, Any]:
    """The routes as OpenAPI has them."""
    paths: dict[str, dict[str, Any]] = {}
    for each in operations(config):
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, config)
    return {
        "openapi": "3.1.0",
        "info": {"title": "hex-llm", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(operation: Operation, config: Config) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": ERROR}}}
    answers = {kind: {"schema": schema} for kind, schema in ANSWERS[operation.path].items()}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            "default": {"description": "An error.", "content": error},
        },
    }
    if operation.schema is not None:
        content = {"application/json": {"schema": operation.schema(config)}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.path.endswith("{id}"):
        name = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [name]
    return described


def _html(config: Config) -> Iterator[str]:
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>hex-llm</title><style>{_STYLE}</style>'
    yield "<h1>hex-llm</h1><p>All that the server answers. The same for programs: <code>/openapi.json</code>.</p>"
    for each in operations(config):
        yield f"<h2><code>{each.method} {escape(each.path)}</code></h2><p>{escape(each.summary)}</p>"
        if each.fields is not None:
            yield "<table><tr><th>field</th><th>meaning</th><th>values</th></tr>"
            yield from (_row(name, field, config) for name, field in each.fields.items())
            yield "</table>"
    yield "</html>"


def _row(name: str, field: Field, config: Config) -> str:
    values = orjson.dumps(field.kind.schema(config)).decode()
    shown = f"<code>{escape(values)}</code>" if len(values) <= _MAX_VALUES else "see <code>/openapi.json</code>"
    needed = " (required)" if field.required else ""
    return f"<tr><td><code>{escape(name)}</code>{needed}</td><td>{escape(field.help)}</td><td>{shown}</td></tr>"
