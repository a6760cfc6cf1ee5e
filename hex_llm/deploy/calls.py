"""Calls of a Python library as values, which can be shown as the program that makes them, or made."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Result:
    """What an earlier call has returned."""

    name: str


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable's value, which is not shown."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    function: str  # with dots, and at first a module or an earlier result
    arguments: Mapping[str, Any]
    result: str | None = None  # the name of what it returns


def show(calls: Sequence[Call], imports: str) -> str:
    """The program, in Python."""
    needs_os = any(_has_variable(call.arguments) for call in calls)
    lines = [*(["import os", ""] if needs_os else []), imports, ""]
    for call in calls:
        assigned = f"{call.result} = " if call.result else ""
        arguments = "".join(f"    {name}={_python(value, 4 + len(name))},\n" for name, value in call.arguments.items())
        lines.append(f"{assigned}{call.function}(\n{arguments})")
    return "\n".join(lines)


def make(call: Call, names: dict[str, Any], environment: Mapping[str, str]) -> None:
    """Makes a call, with what is named in `names`, to which its result is added."""
    first, *rest = call.function.split(".")
    function = names[first]
    for attribute in rest:
        function = getattr(function, attribute)
    arguments = {name: _value(value, names, environment) for name, value in call.arguments.items()}
    result = function(**arguments)
    if call.result:
        names[call.result] = result


def variables(calls: Sequence[Call]) -> list[str]:
    """The environment variables whose values are sent."""
    return [value.name for call in calls for value in _leaves(call.arguments) if isinstance(value, Variable)]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    return [value]


def _has_variable(value: Any) -> bool:
    return any(isinstance(leaf, Variable) for leaf in _leaves(value))


def _value(value: Any, names: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    if isinstance(value, Result):
        return names[value.name]
    if isinstance(value, Variable):
        return environment[value.name]
    if isinstance(value, Mapping):
        return {name: _value(each, names, environment) for name, each in value.items()}
    return value


def _python(value: Any, before: int) -> str:
    """The value as one would write it, at `before` characters of a line."""
    if isinstance(value, Result):
        return value.name
    if isinstance(value, Variable):
        return f"os.environ[{_python(value.name, 0)}]"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return _enclosed("{", [f"{_python(name, 0)}: {_python(each, 0)}" for name, each in value.items()], "}", before)
    if isinstance(value, list):
        return _enclosed("[", [_python(each, 0) for each in value], "]", before)
    return repr(value)


def _enclosed(opening: str, parts: Sequence[str], closing: str, before: int) -> str:
    line = f"{opening}{', '.join(parts)}{closing}"
    if before + len(line) < _WIDTH:
        return line
    return "\n".join([opening, *(f"        {part}," for part in parts), f"    {closing}"])
