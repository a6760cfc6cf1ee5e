"""A model's chat template: jinja in a sandbox, with the functions and blocks that models' templates expect."""

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from hex_llm.errors import ContextTooLong, RequestError

_MAX_REASON = 1000  # characters of what a template says when it refuses


class _Refusal(Exception):
    """What a template says with raise_exception."""


class _Generation(jinja2.ext.Extension):
    """The block by which templates mark what the model wrote, for training; here its content is text like any other."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own, leaves the characters of HTML as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _now}
    return environment


@functools.lru_cache(maxsize=16)
def load_template(source: str) -> jinja2.Template:
    """The template that `source` spells, kept for the next time. To read it is to run the constant parts of it."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"The chat template is not valid: line {error.lineno} is no jinja.") from error
    except (RecursionError, SyntaxError, ValueError) as error:
        raise RequestError("The chat template is not valid: it cannot be read as jinja.") from error


@functools.lru_cache(maxsize=16)
def variables_of(source: str) -> frozenset[str]:
    """The names that a template takes from outside."""
    load_template(source)
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))


def render(source: str, variables: Mapping[str, Any], *, max_chars: int | None = None) -> str:
    """The text that a template makes of `variables`; a failure is the messages' fault, and told in our own words."""
    pieces, num_chars = [], 0
    try:
        for piece in load_template(source).generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if max_chars is not None and num_chars > max_chars:
                raise ContextTooLong(
                    f"The chat template makes more than {max_chars} characters of the messages.", param="messages"
                )
        return "".join(pieces)
    except RequestError:
        raise
    except Exception as error:  # a template is a program: it can fail in any way
        raise RequestError(_reason(error), param="messages") from error


def _reason(error: Exception) -> str:
    if isinstance(error, _Refusal):
        return f"The chat template refuses the messages: {str(error)[:_MAX_REASON]}"
    if isinstance(error, jinja2.UndefinedError | LookupError | AttributeError):
        return "The chat template asks for a value that the messages do not have."
    if isinstance(error, jinja2.exceptions.SecurityError):
        return "The chat template asks for something that templates may not do."
    if isinstance(error, MemoryError):
        return "The chat template needs too much memory for these messages."
    return "The chat template fails on these messages."
