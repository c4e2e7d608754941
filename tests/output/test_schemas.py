from __future__ import annotations

from typing import Any

import pytest

from headstart.output.schemas import any_string, types_of

ROOT = {
    "$defs": {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "a/b~": {"$ref": "#/$defs/unit"},
        "round": {"anyOf": [{"$ref": "#/$defs/round"}, {"type": "integer"}, {"$ref": "#/$defs/unit"}]},
        "self": {"$ref": "#/$defs/self"},
    },
    "type": "object",
    "properties": {"copy": {"type": "boolean"}},
}
UNIT = {"$ref": "#/$defs/unit"}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (None, ""),
        ({"description": "any"}, ""),
        ({"type": ["string", "null"]}, "string null"),
        ({"type": None, "enum": None, "anyOf": [{"type": "string"}]}, "string"),
        ({"enum": ["a", 1, None, True, 1.5, [], {}]}, "string integer null boolean number array object"),
        (UNIT, "string"),
        ({"$ref": "#/$defs/a~1b~0"}, "string"),
        ({"anyOf": [UNIT, {"type": "null"}]}, "string null"),
        ({"oneOf": [UNIT, {"type": "integer"}]}, "string integer"),
        ({"allOf": [UNIT], "description": "the unit"}, "string"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "string"),
        ({"$ref": "#/properties/copy"}, "boolean"),
        ({"$ref": "#"}, "object"),
        ({"$ref": "#/$defs/round"}, "integer string"),
        ({"$ref": "#/$defs/self"}, ""),
        ({"$ref": "#/$defs/none/here"}, ""),
        ({"$ref": "https://example.com/a"}, ""),
        ({"$ref": 3, "anyOf": []}, ""),
    ],
)
def test_what_a_schema_allows(schema: Any, types: str) -> None:
    assert types_of(schema, ROOT) == frozenset(types.split())


def test_many_references_to_each_other_are_followed_once() -> None:
    links = [{"$ref": f"#/$defs/{number}"} for number in range(300)]
    root = {"$defs": {str(number): {"anyOf": links} for number in range(300)}}
    assert types_of(links[0], root) == frozenset()


@pytest.mark.parametrize(
    ("schema", "any_one"),
    [
        ({"type": ["string", "null"]}, True),
        ({"anyOf": [UNIT, {"type": "string"}]}, True),
        ({"anyOf": [UNIT, {"type": "integer"}]}, False),
        ({"type": ["string", "null"], "enum": ["C"]}, False),
        ({"const": "C"}, False),
        ({}, False),
    ],
)
def test_strings_that_are_not_listed(schema: Any, any_one: bool) -> None:
    assert any_string(schema, ROOT) is any_one
