"""Which modules a config means, by their names."""

import re
from collections.abc import Callable

from hex_llm.model_fields import Fields
from hex_llm.module_names import all_names

type Matches = Callable[[str], bool]

HEAD = "lm_head"
# What is no linear module, or is one that no method touches: routers decide, and are small.
_KEPT = ("embed_tokens", "gate", "router")
_REGEX = "re:"
# Patterns come with the model, and some would take ages: names are short, so these bounds are enough.
_LONGEST, _MOST_REPEATS = 1000, 5
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEAT = re.compile(r"[*+{]")


def kept(module: str) -> bool:
    return module.rpartition(".")[2] in _KEPT


def regex(fields: Fields, name: str, text: str) -> re.Pattern[str]:
    """A pattern that a field has."""
    shown = text if len(text) <= 60 else text[:57] + "..."
    if len(text) > _LONGEST:
        raise fields.refuse(name, f"has the pattern {shown!r} of {len(text)} characters; {_LONGEST} are read")
    repeats = len(_REPEAT.findall(text))
    if repeats > _MOST_REPEATS or _REPEATED_GROUP.search(text):
        raise fields.refuse(
            name, f"has the pattern {shown!r}, with more than {_MOST_REPEATS} repeats or one of a group"
        )
    try:
        return re.compile(text)
    except re.error as error:
        raise fields.refuse(name, f"has the pattern {shown!r}, which is none: {error}") from None


def listed(fields: Fields, name: str) -> Matches:
    """Modules with a name, or with a beginning that is one of these patterns after `re:`."""
    texts = fields.texts(name)
    exact = {text for text in texts if not text.startswith(_REGEX)}
    patterns = [regex(fields, name, text.removeprefix(_REGEX)) for text in texts if text.startswith(_REGEX)]

    def matches(module: str) -> bool:
        return any(each in exact or any(pattern.match(each) for pattern in patterns) for each in all_names(module))

    return matches


def within(fields: Fields, name: str) -> Matches:
    """Modules in whose names one of these occurs: words between dots, in which a star stands for any, as transformers
    writes them."""
    texts = fields.texts(name)
    for text in texts:
        regex(fields, name, text)
    patterns = [re.compile(rf"(?:^|\.)(?:{text})(?:\.|$)") for text in texts]
    return lambda module: any(pattern.search(each) for pattern in patterns for each in all_names(module))
