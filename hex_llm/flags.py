"""Flags declared as fields of a dataclass: their checks, their command line, their documentation.

A field's name is the flag. Every flag is read with underscores or dashes, and under its aliases; a boolean `x` is
`--x` or `--no-x`. A value that is not allowed raises ConfigError, whether it came from a command line or from Python.
"""

import argparse
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from hex_llm.errors import ConfigError

INT32_MAX = 2**31 - 1
KINDS = {int: "an integer", float: "a number", str: "a text", bool: "True or False"}


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """All there is to know about one flag."""

    name: str
    kind: type
    optional: bool  # None is allowed, from Python, and means: not set
    choices: tuple[Any, ...]
    default: Any
    group: str
    help: str
    aliases: tuple[str, ...]
    synonyms: Mapping[Any, Any]  # values as other servers spell them, each with the one it stands for
    above: float | None
    at_least: int | None
    at_most: float | None
    refused: Mapping[Any, str]  # values that other servers take and we never will, each with the reason

    def show(self, value: Any) -> str:
        """The flag as one would type it."""
        if isinstance(value, bool):
            return f"--{self.name}" if value else f"--no-{self.name}"
        return f"--{self.name}={value}"

    @property
    def values(self) -> str:
        """The values that are allowed, in words."""
        if self.kind is bool:
            return " or ".join(word for word, value in (("on", True), ("off", False)) if value not in self.refused)
        if self.choices:
            return ", ".join(self._with_synonyms(choice) for choice in self.choices)
        limits = [
            f"{words} {limit}"
            for words, limit in (("above", self.above), ("at least", self.at_least), ("at most", self.at_most))
            if limit is not None and limit != INT32_MAX
        ]
        return " ".join([KINDS[self.kind].split()[-1], *[" and ".join(limits)]]).strip()

    def _with_synonyms(self, choice: Any) -> str:
        synonyms = [str(value) for value, meant in self.synonyms.items() if meant == choice]
        return f"{choice} (or {', '.join(synonyms)})" if synonyms else str(choice)

    def read(self, text: str) -> Any:
        """The value that `text` spells."""
        try:
            return self.kind(text)
        except ValueError:
            raise ConfigError(f"{self.show(text)} must be {KINDS[self.kind]}.") from None

    def accept(self, value: Any) -> Any:
        """The value, or the one that it is a synonym of. Raises ConfigError unless it is allowed."""
        if value is None and self.optional:
            return None
        if type(value) is not self.kind and not (self.kind is float and type(value) is int):
            raise ConfigError(f"--{self.name}={value!r} must be {KINDS[self.kind]}.")
        value = self.synonyms.get(value, value)
        if value in self.refused:
            raise ConfigError(f"{self.show(value)} is refused: {self.refused[value]}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.show(value)} is not one of {self.values}.")
        self._check_limits(value)
        return value

    def _check_limits(self, value: Any) -> None:
        """Raises ConfigError where the value, NaN for one, does not lie within the limits."""
        if self.above is not None and not value > self.above:
            raise ConfigError(f"{self.show(value)} must be above {self.above}.")
        if self.at_least is not None and not value >= self.at_least:
            raise ConfigError(f"{self.show(value)} must be at least {self.at_least}.")
        if self.at_most is not None and not value <= self.at_most:
            raise ConfigError(f"{self.show(value)} must be at most {self.at_most}.")


def flag(
    group: str,
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    synonyms: Mapping[Any, Any] | None = None,
    above: float | None = None,
    at_least: int | None = None,
    at_most: float | None = None,
    refused: Mapping[Any, str] | None = None,
) -> Any:
    """A dataclass field that is a flag. Integers are at least 1 and fit 32 bits, unless told otherwise."""
    metadata = {
        "group": group,
        "help": help,
        "aliases": aliases,
        "synonyms": synonyms or {},
        "above": above,
        "at_least": at_least,
        "at_most": at_most,
        "refused": refused or {},
    }
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def flags_of(cls: type) -> tuple[Flag, ...]:
    """The flags that a dataclass declares, in order."""
    hints = typing.get_type_hints(cls)
    return tuple(_flag_of(field, hints[field.name]) for field in dataclasses.fields(cls))


def _flag_of(field: dataclasses.Field, hint: Any) -> Flag:
    optional = types.NoneType in typing.get_args(hint)  # of a | b, or of the Union that a Literal makes of it
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    kind = type(choices[0]) if choices else hint
    metadata = dict(field.metadata)
    if kind is int and not choices:
        metadata["at_least"] = 1 if metadata["at_least"] is None else metadata["at_least"]
        metadata["at_most"] = INT32_MAX if metadata["at_most"] is None else metadata["at_most"]
    return Flag(name=field.name, kind=kind, optional=optional, choices=choices, default=field.default, **metadata)


class FlagParser(argparse.ArgumentParser):
    """An argument parser with one argument per flag. What it cannot read is a ConfigError, not an exit."""

    def __init__(self, prog: str, description: str, flags: Sequence[Flag]):
        super().__init__(
            prog, usage="%(prog)s [MODEL] [flags]" if flags else None, description=description, allow_abbrev=False
        )
        self.flags = flags
        groups: dict[str, Any] = {}
        for flag in flags:
            if flag.group not in groups:
                groups[flag.group] = self.add_argument_group(flag.group)
            # A flag that is not given stays out of the namespace, to be told from its default given.
            keywords: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(flag).replace("%", "%%")}
            if flag.kind is bool:
                keywords["action"] = argparse.BooleanOptionalAction
            else:
                keywords["type"] = flag.read
                keywords["metavar"] = _metavar(flag)
            groups[flag.group].add_argument(f"--{flag.name}", **keywords)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument ") + ".")

    def parse(self, argv: Sequence[str], retired: Mapping[str, str]) -> tuple[argparse.Namespace, list[str]]:
        """What was given, and the words that belong to no flag.

        `retired` holds the flags of old, and of others, that are refused with a hint.
        """
        spellings = self._spellings()
        end = argv.index("--") if "--" in argv else len(argv)
        plain = [self._plain(word, spellings) for word in argv[:end]]
        namespace, rest = self.parse_known_args(plain)
        unknown = next((word for word in rest if word.startswith("-") and len(word) > 1), None)
        if unknown:
            raise ConfigError(_unknown(unknown.partition("=")[0], spellings, retired))
        return namespace, [*rest, *argv[end + 1 :]]

    def _spellings(self) -> dict[str, str]:
        """From every spelling, with underscores only, to the one argparse knows."""
        spellings = {
            _underscored(option): option
            for action in self._actions
            for option in action.option_strings
            if option.startswith("--")
        }
        for flag in self.flags:
            for alias in map(_underscored, flag.aliases):
                spellings[alias] = f"--{flag.name}"
                if flag.kind is bool:
                    spellings[f"no_{alias}"] = f"--no-{flag.name}"
        return spellings

    def _plain(self, word: str, spellings: Mapping[str, str]) -> str:
        if not word.startswith("--"):
            return word
        name, equals, value = word.partition("=")
        option = spellings.get(_underscored(name), name)
        positive = option.removeprefix("--no-").removeprefix("--")
        if equals and any(flag.kind is bool and flag.name == positive for flag in self.flags):
            raise ConfigError(f"{word} takes no value: write --{positive} or --no-{positive}.")
        return f"{option}{equals}{value}"


def _underscored(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def named(flags: Iterable[Flag], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords by the names of their flags, whichever spelling they came in."""
    names = {_underscored(spelling): flag.name for flag in flags for spelling in (flag.name, *flag.aliases)}
    result: dict[str, Any] = {}
    for keyword, value in given.items():
        if keyword not in names:
            close = difflib.get_close_matches(keyword, names, n=1)
            raise ConfigError(f"There is no setting {keyword}" + (f"; did you mean {close[0]}?" if close else "."))
        if names[keyword] in result:
            raise ConfigError(f"{keyword}={value!r} names the setting {names[keyword]}, which is given already.")
        result[names[keyword]] = value
    return result


def _unknown(word: str, spellings: Mapping[str, str], retired: Mapping[str, str]) -> str:
    name = _underscored(word)
    if name in retired:
        return f"{word} is not a flag here: {retired[name]}"
    close = next(iter(difflib.get_close_matches(name, spellings, n=1)), None)
    if close is None:
        return f"There is no flag {word}; --help lists those there are."
    known = spellings[close] if _underscored(spellings[close]) == close else f"--{close}"
    return f"There is no flag {word}; did you mean {known}?"


def _metavar(flag: Flag) -> str:
    if flag.choices:
        return "{" + ",".join(str(choice) for choice in flag.choices) + "}"
    return {int: "N", float: "X", str: "TEXT"}[flag.kind]


def _default(flag: Flag) -> str:
    if flag.kind is bool:
        return "on" if flag.default else "off"
    return "not set" if flag.default is None else str(flag.default)


def _also(flag: Flag) -> list[str]:
    return [f"--{alias}" for alias in flag.aliases]


def _help(flag: Flag) -> str:
    parts = [flag.help]
    if flag.aliases:
        parts.append(f"Also {', '.join(_also(flag))}.")
    parts += [f"{value} is another word for {meant}." for value, meant in flag.synonyms.items()]
    if flag.default is not None:
        parts.append(f"(default: {_default(flag)})")
    return " ".join(parts)


def markdown_tables(flags: Sequence[Flag]) -> str:
    """One table per group."""
    lines = []
    for group in dict.fromkeys(flag.group for flag in flags):
        lines += [
            f"## {group}",
            "",
            "| flag | also spelled | values | default | meaning |",
            "|---|---|---|---|---|",
        ]
        for flag in (flag for flag in flags if flag.group == group):
            names = [f"--{flag.name}"] + ([f"--no-{flag.name}"] if flag.kind is bool else [])
            cells = (
                " ".join(f"`{name}`" for name in names),
                " ".join(f"`{name}`" for name in _also(flag)),
                flag.values,
                _default(flag),
                flag.help,
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
