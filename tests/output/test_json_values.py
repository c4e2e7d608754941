"""JSON that others wrote: what is read of it can be written again, and nothing in it is an error of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.api.openai_responses.items import as_text
from headstart.chat.partial_json import input_of
from headstart.output.canonical_json import canonical_arguments, canonical_tool
from headstart.output.json_values import DEPTH, countable, json_value, levels
from headstart.output.parser import Parser, message_of
from headstart.prompt.family_detection import FAMILIES

HUGE = "0x" + "f" * 4000
"""A number of more digits than Python writes."""


def nested(depth: int) -> str:
    return '{"a": ' * (depth - 1) + "{}" + "}" * (depth - 1)


@pytest.mark.parametrize(
    "text",
    ["1e400", "[-1e999]", "NaN", "1" + "0" * 400, "1" * 5000, nested(DEPTH + 1), nested(700), nested(50_000), "[", ""],
    ids=lambda text: text[:8] + f" {len(text)}",
)
def test_what_cannot_be_written_again_is_no_value(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        json_value(text)
    arguments = f'{{"x": {text}}}'
    assert canonical_arguments(arguments, {}) == arguments, "a text then, as it came"


def test_what_can_be_is_the_same() -> None:
    for text in ('{"a": [1, 2.5, true, null, "\\u00e9 \\ud83d\\ude00"]}', nested(DEPTH), "1e300", "1" * 300):
        assert json_value(text) == json.loads(text)


def test_half_a_character_is_replaced() -> None:
    text = '{"\\ud83d": "a \\ud83d b \\ud83d\\ude00"}'
    assert json_value(text) == {"\ufffd": "a \ufffd b \U0001f600"}
    assert json.dumps(canonical_arguments(text, {}), ensure_ascii=False).encode()


def test_levels_and_numbers() -> None:
    assert list(levels({"a": [1, {"b": 2}]})) == [[{"a": [1, {"b": 2}]}], [[1, {"b": 2}]], [1, {"b": 2}], [2]]
    assert countable([True, 2**1023, -1.5, {"a": "x"}])
    assert not countable({"a": [float("inf")]})
    assert not countable([2**1024])


def test_tools_as_deep_as_a_body_can_be() -> None:
    for wrap in (
        lambda schema: {"anyOf": [schema]},
        lambda schema: {"items": schema},
        lambda schema: {"properties": {"a": schema}},
        lambda schema: {"default": schema},
    ):
        schema: Any = {"type": "string"}
        for _ in range(200):
            schema = wrap(schema)
        assert canonical_tool({"type": "function", "function": {"name": "f", "parameters": schema}})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("value", [HUGE, "1e999", "1" * 5000, "[" * 180 + "]" * 180, "'\\ud800'", '"\\ud800"', "NaN"])
def test_nothing_that_a_model_writes_is_an_error(family: Any, value: str) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
    calls = family.calls
    for text in (
        f"{calls.open}[f(a={value})]{calls.close}",
        f"{calls.begin}{calls.open}f{calls.name_end}{calls.key}a{calls.key_end}{value}{calls.value_end}{calls.close}",
        f'{calls.begin}{calls.open}{{"name": "f", "arguments": {{"a": {value}}}}}{calls.close}',
    ):
        parser = Parser(family, tools=[tool])
        message = message_of([*parser.feed(text), *parser.end()])
        for call in message.get("tool_calls") or ():
            canonical_arguments(call["function"]["arguments"], None)
        assert json.dumps(message, ensure_ascii=False).encode()


@pytest.mark.parametrize("arguments", ['{"a": "\\ud83d"}', '{"a": 1e400}', '{"a": NaN}', '{"a": "\\ud83d'])
def test_the_input_of_a_call_can_be_written(arguments: str) -> None:
    assert json.dumps(input_of(arguments), ensure_ascii=False, allow_nan=False).encode()
    text = as_text(arguments.replace("a", "input", 1))
    assert text.encode()


def test_arguments_of_very_many_values_stay_text() -> None:
    """All threads would wait for seconds. A long text in the arguments is read."""
    many, long = '{"a": [' + "[]," * 150_000 + "[]]}", '{"a": "' + "x, " * 190_000 + '"}'
    assert canonical_arguments(many, None) == many
    assert canonical_arguments(long, None) == {"a": "x, " * 190_000}
