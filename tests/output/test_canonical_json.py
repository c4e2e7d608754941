"""One form for what means the same: whatever the order of keys and the spacing."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.output.canonical_json import canonical_arguments, canonical_tool

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "edits": {"type": "array", "items": {"$ref": "#/$defs/edit"}},
        "options": {"type": "object", "properties": {"z": {}, "a": {}}},
    },
    "$defs": {"edit": {"type": "object", "properties": {"old": {}, "new": {"type": "string"}}}},
}

NAMES = st.sampled_from(["path", "edits", "options", "old", "new", "z", "a", "q", "b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


def shuffled(value: Any, draw: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(value[key], draw) for key in draw(st.permutations(list(value)))}
    return [shuffled(item, draw) for item in value] if isinstance(value, list) else value


def spaced(value: Any, draw: Any) -> str:
    return json.dumps(
        value,
        indent=draw(st.sampled_from([None, 0, 3])),
        separators=draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :")])),
        ensure_ascii=draw(st.booleans()),
    )


@examples(60)
@given(st.dictionaries(NAMES, VALUES, max_size=5), st.data())
def test_arguments_depend_on_their_value_only(value: dict[str, Any], data: Any) -> None:
    form = canonical_arguments(value, SCHEMA)
    assert form == value
    again = canonical_arguments(spaced(shuffled(value, data.draw), data.draw), SCHEMA)
    assert json.dumps(again) == json.dumps(form)
    assert json.dumps(canonical_arguments(form, SCHEMA)) == json.dumps(form)


def test_keys_stand_as_in_the_schema() -> None:
    given = {"b": 1, "options": {"q": 0, "a": 1, "z": 2}, "a": 0, "edits": [{"new": "n", "old": "o"}], "path": "p"}
    text = '{"path": "p", "edits": [{"old": "o", "new": "n"}], "options": {"z": 2, "a": 1, "q": 0}, "a": 0, "b": 1}'
    assert json.dumps(canonical_arguments(given, SCHEMA)) == text
    assert json.dumps(canonical_arguments(json.dumps(given), None)) == json.dumps(given, sort_keys=True)


def test_what_is_no_object_stays_as_it_is() -> None:
    for text in ('{"a": ', "[1]", '"a"', "3", '{"a": NaN}', '{"a": 1} x', "[" * 100_000):
        assert canonical_arguments(text, SCHEMA) == text
    for nothing in (None, "", " \n", "{}", {}):
        assert canonical_arguments(nothing, SCHEMA) == {}


def test_a_schema_may_be_anything() -> None:
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    for schema in (loop, {"$ref": "#"}, {"$ref": "#/x/y"}, {"properties": []}, {"properties": {"a": True}}, {"items": [{}]}):
        assert json.dumps(canonical_arguments('{"b": [{}], "a": {"d": 1, "c": 2}}', schema)) == (
            '{"a": {"c": 2, "d": 1}, "b": [{}]}'
        )


TOOL = {
    "type": "function",
    "cache_control": {"type": "ephemeral"},
    "function": {
        "name": "edit",
        "description": "Edits a file.",
        "parameters": {
            "type": "object",
            "description": "What to do.",
            "properties": {
                "path": {"type": "string"},
                "edits": {"type": "array", "items": {"type": "object", "properties": {"old": {}, "new": {}}}},
                "cache_control": {"enum": ["b", "a"], "default": {"y": 1, "x": 2}},
            },
            "required": ["path", "edits"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@examples(50)
@given(st.data())
def test_a_tool_depends_on_its_value_only(data: Any) -> None:
    assert json.dumps(canonical_tool(shuffled(TOOL, data.draw))) == json.dumps(canonical_tool(TOOL))


def test_a_tool_in_its_form() -> None:
    form = canonical_tool(TOOL)
    assert list(form) == ["type", "function"]
    assert list(form["function"]) == ["name", "description", "parameters", "strict"]
    parameters = form["function"]["parameters"]
    assert list(parameters) == ["type", "description", "properties", "required", "additionalProperties"]
    assert list(parameters["properties"]) == ["path", "edits", "cache_control"]
    assert list(parameters["properties"]["edits"]["items"]["properties"]) == ["new", "old"]
    assert json.dumps(parameters["properties"]["cache_control"]) == '{"enum": ["b", "a"], "default": {"x": 2, "y": 1}}'
    assert form["function"] == TOOL["function"]
    assert canonical_tool(form) == form


def test_a_tool_of_another_kind_keeps_everything_but_hints() -> None:
    tool = {"prompt_cache_breakpoint": {"mode": "explicit"}, "custom": {"b": 1, "a": 2}, "type": "custom"}
    assert json.dumps(canonical_tool(tool)) == '{"type": "custom", "custom": {"a": 2, "b": 1}}'
