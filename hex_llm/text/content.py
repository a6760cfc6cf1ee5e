"""The content of messages in the form that a chat template reads: a string, or a list of parts.

Templates of models that also see pictures go through a list of parts; some of them show nothing of a string (Llama
Guard 3 1B), and some only the first part of a system message (Gemma 3). Others know of strings only, and show a list
as Python writes it. Which it is, a template is asked: it gets a message of each form and role, and what does not
appear in the text as it was is not read.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from hex_llm.errors import RequestError
from hex_llm.text.template import render

# Neither upper nor lower case changes them, and whoever writes a list down, writes the line's end as two characters.
_FIRST, _SECOND = "70614\n29385", "18273\n64950"
_MAX_CHARS = 200_000
_OTHER = {"role": "user", "content": "1"}


def as_read(
    template: str, messages: Sequence[dict[str, Any]], special_tokens: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The messages with their contents in a form that the template shows all of.

    Parts that the template does not go through are joined by lines. `special_tokens` are those that have names.
    """
    tokens = frozenset(special_tokens.items())
    return [{**message, "content": _form(template, message, tokens)} for message in messages]


def _form(template: str, message: dict[str, Any], tokens: frozenset[tuple[str, str]]) -> str | list[dict[str, Any]]:
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        if _shows_strings(template, role, tokens) or not _shows_parts(template, role, tokens):
            return content
        return _parts(content)
    if _shows_parts(template, role, tokens):
        return content
    return "\n".join(part["text"] for part in content)


@functools.lru_cache(maxsize=64)
def _shows_strings(template: str, role: str, tokens: frozenset[tuple[str, str]]) -> bool:
    return _FIRST in _rendered(template, role, tokens, _FIRST)


@functools.lru_cache(maxsize=64)
def _shows_parts(template: str, role: str, tokens: frozenset[tuple[str, str]]) -> bool:
    text = _rendered(template, role, tokens, _parts(_FIRST, _SECOND))
    return _FIRST in text and _SECOND in text


def _parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def _rendered(template: str, role: str, tokens: frozenset[tuple[str, str]], content: Any) -> str:
    """A short conversation with such a message; nothing where the template refuses it."""
    message = {"role": role, "content": content}
    before = [] if role in ("system", "developer", "user") else [_OTHER]
    after = [_OTHER] if role in ("system", "developer") else []
    variables = {
        **dict(tokens),
        "messages": [*before, message, *after],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    try:
        return render(template, variables, max_chars=_MAX_CHARS)
    except RequestError:
        return ""
