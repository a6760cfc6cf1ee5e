"""Values that a JSON Schema of the server allows, those at the edges above all."""

import random
from typing import Any

_TINY = (5e-324, 1e-300, 1e-45, 1e-38, 1e-7)
_ALPHABETS = ("a", "hi ", "é", "漢", "🙂", "\0", "\n", "e\u0301", "\u202e", "\ufffd", "</s>", "[assistant]")


def legal_value(rng: random.Random, schema: dict[str, Any]) -> Any:
    if "anyOf" in schema:
        return legal_value(rng, rng.choice(schema["anyOf"]))
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    match schema["type"]:
        case "boolean":
            return rng.random() < 0.5
        case "integer":
            return _integer(rng, schema["minimum"], schema["maximum"])
        case "number":
            return _number(rng, schema)
        case "string":
            return _string(rng, schema)
        case "array":
            return _array(rng, schema)
        case "object":
            return _object(rng, schema)
    return None


def _integer(rng: random.Random, low: int, high: int) -> int:
    near = (low, low + 1, low + 2, low + 9, 0, 1, 319, high - 1, high, rng.randint(low, high))
    return rng.choice([value for value in near if low <= value <= high])


def _number(rng: random.Random, schema: dict[str, Any]) -> float:
    high = schema["maximum"]
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"]
        near = (low + tiny for tiny in _TINY)
    else:
        low = schema["minimum"]
        near = (low, *(low + tiny for tiny in _TINY))
    return rng.choice((*near, high, 1, rng.uniform(low, high) or high))


def _string(rng: random.Random, schema: dict[str, Any]) -> str:
    if "pattern" in schema:
        return rng.choice(("a-1", "a", "a.b_c-9" * 15))
    low, high = schema.get("minLength", 0), schema.get("maxLength", 5000)
    length = rng.choice([size for size in (low, low + 1, 5, 30, 255, high) if low <= size <= min(high, 5000)])
    letters = rng.choice(_ALPHABETS)
    return (letters * length)[:length]


def _array(rng: random.Random, schema: dict[str, Any]) -> list[Any]:
    low, high = schema.get("minItems", 0), schema.get("maxItems", 50)
    size = rng.choice([size for size in (low, low + 1, 2, 4, high) if low <= size <= min(high, 1100)])
    if size <= 5:
        return [legal_value(rng, schema["items"]) for _ in range(size)]
    return [legal_value(rng, schema["items"])] * size


def _object(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    if "properties" in schema:
        required = schema.get("required", [])
        chosen = [*required, *rng.sample(sorted(schema["properties"]), rng.choice((0, 0, 1, 2)))]
        return {name: legal_value(rng, schema["properties"][name]) for name in dict.fromkeys(chosen)}
    values = schema.get("additionalProperties")
    if not values:
        return rng.choice(({}, {"a": "b"}))
    tokens = rng.choice(((), (0,), (2, 319), range(320)))
    return {str(token): legal_value(rng, values) for token in tokens}
