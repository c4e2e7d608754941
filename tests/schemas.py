"""Random JSON schemas that limit the length of a reply, whatever the model."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "city", "größe", 'quo"te', "a b", "n", "kind", "<|im_start|>", "back\\slash", "日本")
PATTERNS = ("^[a-z]{1,6}$", "^\\d{4}-\\d{2}$", "^(red|green|blue)$", "^[A-F0-9]{2,4}$", "^x?y{0,3}$", '^[^"]{1,5}$')


def schema(dice: random.Random) -> dict[str, Any]:
    """A schema, with shared parts under `$defs`."""
    parts = {f"part{number}": _value(dice, 1, {}) for number in range(dice.randint(0, 2))}
    found = _value(dice, 3, parts)
    if parts:
        found = {**found, "$defs": parts}
    return found


def _value(dice: random.Random, depth: int, parts: dict[str, Any]) -> dict[str, Any]:
    kinds = [_string, _number, _integer, _choice, _constant, _boolean]
    if depth:
        kinds += [_object, _object, _array, _either]
    if parts and dice.random() < 0.3:
        return {"$ref": f"#/$defs/{dice.choice(sorted(parts))}"}
    return dice.choice(kinds)(dice, depth, parts)


def _string(dice: random.Random, depth: int, parts: dict[str, Any]) -> dict[str, Any]:
    if dice.random() < 0.5:
        return {"type": "string", "pattern": dice.choice(PATTERNS)}
    least = dice.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 6)}


def _number(dice: random.Random, depth: int, parts: dict[str, Any]) -> dict[str, Any]:
    # A schema cannot limit the digits after the point, so numbers that are not integers come from a list.
    return {"enum": [round(dice.uniform(-1e3, 1e3), dice.randint(0, 4)) for _ in range(dice.randint(1, 3))]}


def _integer(dice: random.Random, depth: int, parts: dict[str, Any]) -> dict[str, Any]:
    least = dice.randint(-2000, 2000)
    most = least + dice.choice((0, 1, 9, 250, 100_000))
    if dice.random() < 0.3:
        return {"type": "integer", "exclusiveMinimum": least - 1, "exclusiveMaximum": most + 1}
    return {"type": "integer", "minimum": least, "maximum": most}


def _choice(dice: random.Random, depth: int, parts: dict[str, Any]) -> dict[str, Any]:
    return {"enum": dice.sample([*WORDS, 1, -2.5, True, None, "", [1, "a"], {"k": []}], dice.randint(1, 4))}


def _constant(dice: random.Random, depth: int, parts: dict[str, Any]) -> dict[str, Any]:
    return {"const": dice.choice([*WORDS, 0, None])}


def _boolean(dice: random.Random, depth: int, parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": dice.choice(["boolean", "null", ["boolean", "null"]])}


def _object(dice: random.Random, depth: int, parts: dict[str, Any]) -> dict[str, Any]:
    names = dice.sample(WORDS, dice.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _value(dice, depth - 1, parts) for name in names},
        "required": [name for name in names if dice.random() < 0.6],
        "additionalProperties": False,
    }


def _array(dice: random.Random, depth: int, parts: dict[str, Any]) -> dict[str, Any]:
    if dice.random() < 0.3:
        fixed = [_value(dice, depth - 1, parts) for _ in range(dice.randint(1, 3))]
        return {"type": "array", "prefixItems": fixed, "items": False, "minItems": len(fixed)}
    least = dice.randint(0, 2)
    return {"type": "array", "items": _value(dice, depth - 1, parts), "minItems": least, "maxItems": least + dice.randint(0, 2)}


def _either(dice: random.Random, depth: int, parts: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [_value(dice, depth - 1, parts) for _ in range(dice.randint(1, 3))]}
