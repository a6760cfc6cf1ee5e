"""Writes the tables of docs/api.md anew, from the declarations that requests are read by: python scripts/api_page.py

What stands between <!-- NAME --> and <!-- end --> is written here; the rest of the page is written by hand.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from hex_llm.config import Config
from hex_llm.server import chat_schema, completion_schema, docs, tokens, vertex_schema
from hex_llm.server.fields import fields_schema

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
_PART = re.compile(r"(?<=<!-- )(?!end)([^>]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
_REFUSED = "Not supported"  # with which the help of such a field begins

type Schema = Mapping[str, Any]


class FlagNames:
    """A Config whose settings are the names of their flags: where a schema has a limit, it then has the flag."""

    def __getattr__(self, name: str) -> str:
        return name


def written(page: str) -> str:
    """The page with its tables as they are now."""
    return _PART.sub(lambda part: part[1] + part[2] + "\n" + "\n".join(_PARTS[part[1]]()) + "\n\n", page)


def _routes() -> Iterator[str]:
    yield "| route | |"
    yield "|---|---|"
    yield from (f"| `{each.method} {each.path}` | {each.summary} |" for each in docs.OPERATIONS)


def _fields(schema: Callable[[Config], Schema], request: Any = None) -> Iterator[str]:
    """The members of a body. `request` is what the least body makes: it has the defaults."""
    rows = dict(_members(schema(cast(Config, FlagNames()))))
    yield "| field | values | default | meaning |"
    yield "|---|---|---|---|"
    refused = []
    for name, (member, required) in rows.items():
        if member["description"].startswith(_REFUSED):
            refused.append(f"`{name}`" + (f" ({taken})" if (taken := _values(member)) else ""))
        else:
            default = "required" if required else _default(name, request)
            yield f"| `{name}` | {_values(member)} | {default} | {member['description']} |".replace("\\", "\\\\")
    if refused:
        yield ""
        yield f"Known and refused, unless the value is one in brackets: {', '.join(refused)}."


def _members(schema: Schema, within: str = "") -> Iterator[tuple[str, tuple[Schema, bool]]]:
    for name, member in schema["properties"].items():
        kinds = [kind for kind in member.get("anyOf", ()) if kind != {"type": "null"}]
        plain = {**kinds[0], "description": member["description"]} if len(kinds) == 1 else member
        yield within + name, (plain, name in schema.get("required", ()))
        if "properties" in plain:
            yield from _members(plain, f"{within}{name}.")
        elif "properties" in plain.get("items", ()):
            yield from _members(plain["items"], f"{within}{name}[].")


def _values(schema: Schema) -> str:
    """A JSON Schema in words."""
    if "anyOf" in schema:
        return "; or ".join(words for kind in schema["anyOf"] if (words := _values(kind)))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    match schema["type"]:
        case "integer" | "number" as kind:
            if "exclusiveMinimum" in schema:
                return f"{kind} above {schema['exclusiveMinimum']}, at most {_limit(schema['maximum'])}"
            return f"{kind}, {_limit(schema['minimum'])} to {_limit(schema['maximum'])}"
        case "boolean":
            return "true or false"
        case "string":
            return "string" + _length(schema)
        case "array":
            most = f", at most {_limit(schema['maxItems'])}" if "maxItems" in schema else ""
            return f"list of {_plural(schema['items'])}{most}"
        case "object" if "maxProperties" in schema:
            each = _values(schema["additionalProperties"])
            return f"object of at most {_limit(schema['maxProperties'])} entries, each a {each}"
        case "null":
            return ""
        case kind:
            return kind


def _plural(schema: Schema) -> str:
    match schema:
        case {"type": "integer"}:
            return f"integers, {_limit(schema['minimum'])} to {_limit(schema['maximum'])}"
        case {"type": "array"}:
            return f"lists of {_plural(schema['items'])}"
        case {"type": "string"}:
            return "strings" + _length(schema)
    return "objects"


def _length(schema: Schema) -> str:
    if "pattern" in schema:
        return f" like `{schema['pattern']}`"
    if "maxLength" in schema:
        least = f"{schema['minLength']} to" if schema["minLength"] else "at most"
        return f" of {least} {_limit(schema['maxLength'])} characters"
    return ", not empty" if "minLength" in schema else ""


def _limit(limit: float | str) -> str:
    if isinstance(limit, str):
        return f"`--{limit}` ({getattr(Config(), limit):,})"
    for power in (31, 63):
        for sign, end in (("", 2**power - 1), ("-", -(2**power))):
            if limit == end:
                return f"{sign}2^{power}" + ("" if sign else " - 1")
    return f"{limit:,}"


def _default(name: str, request: Any) -> str:
    for part in (request, getattr(request, "sampling", None)):
        if dataclasses.is_dataclass(part) and (value := getattr(part, name, None)) not in (None, (), {}):
            return f"`{json.dumps(value)}`"
    return ""


def _chat() -> Iterator[str]:
    least = {"messages": [{"role": "user", "content": "Hello"}]}
    return _fields(chat_schema.openapi, chat_schema.read_chat(least, Config(), {}))


def _completion() -> Iterator[str]:
    return _fields(completion_schema.openapi, completion_schema.read_completion({"prompt": "Hello"}, Config(), {}))


def _instance() -> Iterator[str]:
    (least,) = vertex_schema.read_generate({"prompt": "Hello"}, Config(), {}).prompts
    return _fields(lambda config: fields_schema(vertex_schema.FIELDS, config), least)


_PARTS: Mapping[str, Callable[[], Iterator[str]]] = {
    "routes": _routes,
    "fields of /v1/chat/completions": _chat,
    "fields of /v1/completions": _completion,
    "fields of /generate": lambda: _fields(lambda config: vertex_schema.openapi(config)["anyOf"][0]),
    "fields of an instance": _instance,
    "fields of /tokenize": lambda: _fields(tokens.tokenize_openapi),
    "fields of /detokenize": lambda: _fields(tokens.detokenize_openapi),
}


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
