"""The members of a request's body: each is declared once, and read, refused and documented by that declaration.

A table maps names to `Field`s. null is the same as leaving a member out; a member that is in no table is refused.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hex_llm.config import Config
from hex_llm.engine.sampling import shown
from hex_llm.errors import RequestError, Unsupported

INT32_MAX = 2**31 - 1
MAX_SHOWN = 60  # characters of what a client sent, in a message

type Limit = float | str  # a number, or the name of the flag that holds it


@dataclass(frozen=True, slots=True)
class Rules:
    """What the declarations leave open."""

    config: Config
    integral_floats: bool = False  # 50.0 is a whole number: what comes through protobuf knows no other

    def limit(self, limit: Limit) -> float:
        return getattr(self.config, limit) if isinstance(limit, str) else limit

    def words(self, limit: Limit) -> str:
        return f"{self.limit(limit)} (--{limit})" if isinstance(limit, str) else str(limit)


class Kind(Protocol):
    """What a value may be."""

    def read(self, value: Any, param: str, rules: Rules) -> Any:
        """The value, checked. RequestError names it, as `param`, and what it must be."""
        ...

    def schema(self, config: Config) -> dict[str, Any]:
        """The same as JSON Schema."""
        ...


class Field(NamedTuple):
    kind: Kind
    help: str
    required: bool = False


type Fields = Mapping[str, Field]


def read_fields(body: Mapping[str, Any], fields: Fields, rules: Rules, *, within: str = "") -> dict[str, Any]:
    """The members that are given, checked. `within` is the path of the object, for those inside of others."""
    values = {}
    for name, value in body.items():
        field = fields.get(name)
        if field is None:
            raise _unknown(name, fields, within)
        if value is not None:
            values[name] = field.kind.read(value, f"{within}{name}", rules)
    for name, field in fields.items():
        if field.required and name not in values:
            raise RequestError(f"{within}{name} is missing.", param=f"{within}{name}")
    return values


def fields_schema(fields: Fields, config: Config) -> dict[str, Any]:
    """The JSON Schema of an object with these members."""
    properties = {
        name: {
            **(field.kind.schema(config) if field.required else _nullable(field.kind.schema(config))),
            "description": field.help,
        }
        for name, field in fields.items()
    }
    required = [name for name, field in fields.items() if field.required]
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | {"required": required} if required else schema


def describe(value: object) -> str:
    """A value of JSON as a message can hold it, however large it is."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return repr(value) if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]!r}... ({len(value)} characters)"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case dict():
            return "an object" if value else "an empty object"
    return shown(value)


def refuse(param: str, value: object, must: str) -> RequestError:
    return RequestError(f"{param}={describe(value)} must be {must}.", param=param)


@dataclass(frozen=True, slots=True)
class Integer:
    at_least: int
    at_most: Limit

    def read(self, value: Any, param: str, rules: Rules) -> int:
        value = whole(value, rules)
        if type(value) is not int or not self.at_least <= value <= rules.limit(self.at_most):
            raise refuse(param, value, f"a whole number from {self.at_least} to {rules.words(self.at_most)}")
        return value

    def schema(self, config: Config) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.at_least, "maximum": Rules(config).limit(self.at_most)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    at_least: float | None = None
    above: float | None = None
    at_most: float

    def read(self, value: Any, param: str, rules: Rules) -> float:
        fits = (
            type(value) in (int, float)
            and value <= self.at_most
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
        )
        if not fits:
            below = f"above {self.above}" if self.at_least is None else f"at least {self.at_least}"
            raise refuse(param, value, f"a number, {below} and at most {self.at_most}")
        return value

    def schema(self, config: Config) -> dict[str, Any]:
        below = {"exclusiveMinimum": self.above} if self.at_least is None else {"minimum": self.at_least}
        return {"type": "number", **below, "maximum": self.at_most}


@dataclass(frozen=True, slots=True)
class Boolean:
    def read(self, value: Any, param: str, rules: Rules) -> bool:
        if not isinstance(value, bool):
            raise refuse(param, value, "true or false")
        return value

    def schema(self, config: Config) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A string of so many characters."""

    at_least: int = 0
    at_most: int

    def read(self, value: Any, param: str, rules: Rules) -> str:
        if not isinstance(value, str) or not self.at_least <= len(value) <= self.at_most:
            raise refuse(param, value, f"a string of {self.at_least} to {self.at_most} characters")
        return value

    def schema(self, config: Config) -> dict[str, Any]:
        return {"type": "string", "minLength": self.at_least, "maxLength": self.at_most}


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A list of strings, or where `single` says so one string in place of a list of one."""

    most: Limit
    longest: Limit
    single: bool = False

    def read(self, value: Any, param: str, rules: Rules) -> tuple[str, ...]:
        texts = (value,) if self.single and isinstance(value, str) else value
        if not isinstance(texts, list | tuple):
            raise refuse(param, value, "a string or a list of strings" if self.single else "a list of strings")
        check_count(param, len(texts), self.most, rules)
        longest = rules.limit(self.longest)
        for place, text in enumerate(texts):
            if not isinstance(text, str) or not 1 <= len(text) <= longest:
                where = param if texts is not value else f"{param}[{place}]"
                raise refuse(where, text, f"a string of 1 to {rules.words(self.longest)} characters")
        return tuple(texts)

    def schema(self, config: Config) -> dict[str, Any]:
        text = {"type": "string", "minLength": 1, "maxLength": Rules(config).limit(self.longest)}
        texts = {"type": "array", "items": text, "maxItems": Rules(config).limit(self.most)}
        return {"anyOf": [text, texts]} if self.single else texts


@dataclass(frozen=True, slots=True)
class Tokens:
    """A list of token ids; which of them the model has is not known here."""

    most: Limit

    def read(self, value: Any, param: str, rules: Rules) -> list[int]:
        if not isinstance(value, list):
            raise refuse(param, value, "a list of tokens, which are whole numbers")
        check_count(param, len(value), self.most, rules)
        return read_tokens(value, param, rules)

    def schema(self, config: Config) -> dict[str, Any]:
        return {"type": "array", "items": TOKEN_SCHEMA, "maxItems": Rules(config).limit(self.most)}


@dataclass(frozen=True, slots=True)
class Object:
    """An object whose members are declared."""

    fields: Fields

    def read(self, value: Any, param: str, rules: Rules) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refuse(param, value, "an object")
        return read_fields(value, self.fields, rules, within=f"{param}.")

    def schema(self, config: Config) -> dict[str, Any]:
        return fields_schema(self.fields, config)


@dataclass(frozen=True, slots=True)
class AnyObject:
    """An object whose members are nobody's affair."""

    def read(self, value: Any, param: str, rules: Rules) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refuse(param, value, "an object")
        return value

    def schema(self, config: Config) -> dict[str, Any]:
        return {"type": "object"}


class Only:
    """A member whose part does not exist: the values that ask for nothing are taken, any other is refused."""

    def __init__(self, *allowed: Any, reason: str):
        self._allowed = allowed
        self._reason = reason

    def read(self, value: Any, param: str, rules: Rules) -> Any:
        # JSON tells 1 from true, and Python does not.
        if any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in self._allowed):
            return value
        raise Unsupported(f"{param}={describe(value)} is not supported: {self._reason}", param=param)

    def schema(self, config: Config) -> dict[str, Any]:
        return {"enum": list(self._allowed)} if self._allowed else {"type": "null"}


TOKEN_SCHEMA = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}


def read_tokens(values: list[Any], param: str, rules: Rules) -> list[int]:
    """Token ids, of which there may be millions."""
    kinds = set(map(type, values))
    if float in kinds and rules.integral_floats:
        values = [whole(value, rules) for value in values]
        kinds = set(map(type, values))
    if not kinds <= {int} or (values and not 0 <= min(values) <= max(values) <= INT32_MAX):
        place, value = next(
            (place, value)
            for place, value in enumerate(values)
            if type(value) is not int or not 0 <= value <= INT32_MAX
        )
        raise refuse(f"{param}[{place}]", value, f"a token, a whole number from 0 to {INT32_MAX}")
    return values


def whole(value: Any, rules: Rules) -> Any:
    """A number without a fraction as an integer, where that is allowed; anything else as it is.

    A float of 2**63 or more is none: it may be what the parser made of an integer that is too large.
    """
    integral = type(value) is float and value.is_integer() and abs(value) < 2**63
    return int(value) if rules.integral_floats and integral else value


def check_count(param: str, count: int, most: Limit, rules: Rules) -> None:
    if count > rules.limit(most):
        raise RequestError(f"{param} has {count} entries; it may have {rules.words(most)}.", param=param)


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return schema if schema == {"type": "null"} else {"anyOf": [schema, {"type": "null"}]}


def _unknown(name: str, fields: Fields, within: str) -> RequestError:
    param = f"{within}{name[:MAX_SHOWN]}"
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.75) if len(name) <= MAX_SHOWN else []
    hint = f"; did you mean {within}{close[0]}?" if close else "."
    return Unsupported(f"{within}{describe(name)} is not a field of this request{hint}", param=param)
