"""Reading the fields of a JSON file one by one, so that a wrong one is named."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hex_llm.errors import CheckpointError

LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object of a model's config. A field that is null counts as absent, as it does in transformers."""

    source: str  # the file, for messages
    values: Mapping[str, Any]
    prefix: str = ""  # where in the file the object lies

    def refuse(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.prefix}{name} {why}.")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, smallest: int = 1, largest: int = LARGEST) -> int:
        """A whole number, of at least 1 if nothing else is said."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, f"is {_shown(value)}, not a whole number")
        if not smallest <= value <= largest:
            raise self.refuse(name, f"is {_shown(value)}, not a number from {smallest} to {largest}")
        return value

    def integer_unless_null(self, name: str, default: int) -> int | None:
        """A whole number of at least 1, or None where the file says null: for fields that null switches off."""
        return None if name in self.values and not self.has(name) else self.integer(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, f"is {_shown(value)}, not a number")
        # An integer may be too large for a float, and infinity can be spelled 1e999.
        if not 0 < value < 2.0**1000 or not math.isfinite(value):
            raise self.refuse(name, f"is {_shown(value)}, not a finite number above 0")
        return float(value)

    def number_unless_null(self, name: str, default: float | None) -> float | None:
        """As `number`, or None where the file says null, or says nothing and there is no default."""
        if not self.has(name) and (name in self.values or default is None):
            return None
        return self.number(name, default)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """So many finite numbers above 0."""
        value = self._get(name, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.refuse(name, f"is not a list of {count} numbers")
        return tuple(Fields(self.source, {name: each}, self.prefix).number(name) for each in value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, f"is {_shown(value)}, not true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, f"is {_shown(value)}, not text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of text, which may be absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.refuse(name, f"is {_shown(value)}, not a list of text")
        return tuple(value)

    def one_of[T](self, name: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """What a text, of those that are known, stands for."""
        value = self.text(name, default)
        if value not in choices:
            raise self.refuse(name, f"is {_shown(value)}, not {' or '.join(choices)}")
        return choices[value]

    def only(self, *names: str) -> None:
        """Refuses a field beyond these that says anything."""
        for name, value in self.values.items():
            if name not in names and _says_something(value):
                raise self.refuse(name, f"is {_shown(value)}, and what it means is not known")

    def none_of(self, *names: str) -> None:
        """Refuses those of these fields that say anything."""
        for name in names:
            value = self.values.get(name)
            if _says_something(value):
                raise self.refuse(name, f"is {_shown(value)}, which is not supported")

    def section(self, name: str) -> "Fields | None":
        """The object inside a field, or None where the field is absent."""
        if not self.has(name):
            return None
        value = self.values[name]
        if not isinstance(value, dict):
            raise self.refuse(name, f"is {_shown(value)}, not an object")
        return Fields(self.source, value, f"{self.prefix}{name}.")

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """The object, with what it leaves out taken from there."""
        given = {name: value for name, value in self.values.items() if value is not None or name not in defaults}
        return Fields(self.source, {**defaults, **given}, self.prefix)

    def _get(self, name: str, default: Any) -> Any:
        if self.has(name):
            return self.values[name]
        if default is None:
            raise self.refuse(name, "is missing")
        return default


def _says_something(value: Any) -> bool:
    return value not in (None, False, "", [], {})


def _shown(value: Any) -> str:
    """A value as a message shows it: however long it is, the message stays one line."""
    # Turning an integer of thousands of digits into text is refused by Python.
    text = "a huge number" if isinstance(value, int) and abs(value) > 10**30 else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
