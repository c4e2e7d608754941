"""Grammars, compiled by llguidance for the bundled model's tokens: what they take, what they refuse, and what comes of it."""

from __future__ import annotations

import ctypes
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import llama_cpp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from effort import examples
from headstart.engines.llama.load import open_model
from headstart.engines.llama.vocab import LlamaTokenizer
from headstart.errors import InvalidRequest
from headstart.output.formats import ToolCallFormat
from headstart.output.grammar import Grammar, grammar_for
from headstart.output.parser import Parser, message_of
from headstart.prompt.family_detection import FAMILIES, GENERIC, THINK, Family

BY_NAME = {family.name: family for family in (*FAMILIES, GENERIC)}
BARE = Family("bare", BY_NAME["hermes"].calls)


@pytest.fixture(scope="module")
def tokens(demo_model: Path) -> Iterator[LLTokenizer]:
    model = open_model(demo_model, 0, lambda _: None)
    vocabulary = LlamaTokenizer(model)
    controls = {control.id for control in vocabulary.controls}
    pieces = [b"\xff" * (token in controls) + vocabulary.token_bytes(token) for token in range(vocabulary.n_vocab)]
    yield LLTokenizer.from_llamacpp(
        tokens=pieces,
        vocab_ptr=llama_cpp.llama_model_get_vocab(model),
        tokenize_fptr=ctypes.cast(llama_cpp.llama_cpp._lib.llama_tokenize, ctypes.c_void_p).value,
        eos_token=sorted(vocabulary.eog),
        slices=None,
    )
    llama_cpp.llama_model_free(model)


def compiled(tokens: LLTokenizer, grammar: Grammar | None) -> LLMatcher:
    assert grammar is not None
    assert grammar.kind == "lark"
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar.text), log_level=0)
    assert not matcher.is_error(), (matcher.get_error(), grammar.text)
    return matcher


def takes(tokens: LLTokenizer, grammar: Grammar | None, text: str) -> bool:
    matcher = compiled(tokens, grammar)
    ids = tokens.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def tool(name: str, strict: bool = False, /, **properties: Any) -> dict[str, Any]:
    required = [key for key, schema in properties.items() if not schema.pop("optional", False)]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


def tools(strict: bool = False) -> list[dict[str, Any]]:
    return [
        tool("weather", strict, city={"type": "string"}, days={"type": "integer", "optional": True}),
        tool("weather_now", strict, exact={"type": "boolean"}, unit={"enum": ["C", "F"]}),
    ]


FORCED: dict[str, tuple[str, ...]] = {
    "hermes": ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "generic": ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", ""),
    "mistral-list": ('[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]"),
    "deepseek-r1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "phi": ('<|tool_call|>[{"name": "', '", "arguments": ', "}]<|/tool_call|>"),
    "phi-each": ('<|tool_call|>{"name": "', '", "arguments": ', "}<|/tool_call|>"),
    "lfm-json": ('<|tool_call_start|>[{"name": "', '", "arguments": ', "}]<|tool_call_end|>"),
    "nemotron": ('<TOOLCALL>[{"name": "', '", "arguments": ', "}]</TOOLCALL>"),
    "granite": ('<|tool_call|>[{"name": "', '", "arguments": ', "}]"),
    "cohere": ('<|START_ACTION|>[{"tool_name": "', '", "parameters": ', "}]<|END_ACTION|>"),
    "harmony": ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
    "llama": ('{"name": "', '", "parameters": ', "}"),
}
"""Of the families with JSON arguments: what stands before the name, before the arguments and behind them."""

WRITTEN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "qwen-xml": (
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=weather>\n<parameter=city>\nA <b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=weather_now>\n<parameter=exact>\ntrue\n</parameter>\n"
            "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "<tool_call>\n<function=other>\n</function>\n</tool_call>",
            "<tool_call>\n<function=weather>\n</function>\n</tool_call>",
            "<tool_call>\n<function=weather>\n<parameter=town>\nParis\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=weather>\n<parameter=city>\nA\n</parameter>\n<parameter=days>\nx\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=weather_now>\n<parameter=exact>\ntrue\n</parameter>\n<parameter=unit>\nK\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
    ),
    "seed": (
        ("<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",),
        ("<tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n</tool_call>",),
    ),
    "minimax": (
        (
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
            '<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>',
        ),
        ('<minimax:tool_call>\n<invoke name="weather">\n</invoke>\n</minimax:tool_call>',),
    ),
    "glm": (
        ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",),
        (
            "<tool_call>weather\n<arg_key>town</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
            "<tool_call>x\n</tool_call>",
        ),
    ),
    "lfm": (
        (
            '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>',
            '<|tool_call_start|>[weather(city="Paris", days=3), weather_now(exact=True, unit="F")]<|tool_call_end|>',
        ),
        (
            "<|tool_call_start|>[weather()]<|tool_call_end|>",
            '<|tool_call_start|>[weather(city="Paris", days="3")]<|tool_call_end|>',
            "<|tool_call_start|>[weather(days=3)]<|tool_call_end|>",
        ),
    ),
    "gemma4": (
        (
            '<|tool_call>call:weather{city:<|"|>Paris "a", {b}<|"|>}<tool_call|>',
            '<|tool_call>call:weather{city:<|"|><|"|>,days:3}<tool_call|>'
            '<|tool_call>call:weather_now{exact:true,unit:<|"|>C<|"|>}<tool_call|>',
        ),
        (
            "<|tool_call>call:weather{}<tool_call|>",
            '<|tool_call>call:weather{days:3,city:<|"|>a<|"|>}<tool_call|>',
            '<|tool_call>call:weather{city:<|"|>a<|"|>,days:<|"|>3<|"|>}<tool_call|>',
            '<|tool_call>call:weather{town:<|"|>a<|"|>}<tool_call|>',
            '<|tool_call>call:weather_now{exact:true,unit:<|"|>K<|"|>}<tool_call|>',
            "<|tool_call>call:other{}<tool_call|>",
        ),
    ),
    "llama4": (('[weather(city="Paris")]',), ('[other(city="Paris")]', "text")),
}
"""Of the others: calls that are taken, and some that are not."""

XML = [name for name in WRITTEN if (calls := BY_NAME[name].calls) and calls.syntax == "xml"]


def test_every_family_is_here() -> None:
    assert set(FORCED) | set(WRITTEN) == set(BY_NAME)


@pytest.mark.parametrize("name", FORCED)
def test_json_arguments(tokens: LLTokenizer, name: str) -> None:
    before, middle, after = FORCED[name]

    def call(function: str, arguments: str) -> str:
        return before + function + middle + arguments + after

    grammar = grammar_for(BY_NAME[name], tools(), "required")
    assert takes(tokens, grammar, call("weather", '{"city": "Paris", "days": 3}'))
    assert takes(tokens, grammar, call("weather_now", '{"exact": true, "unit": "C"}'))
    assert not takes(tokens, grammar, call("weather_now", '{"exact": true, "unit": "K"}'))
    assert not takes(tokens, grammar, call("weather", "{}"))
    assert not takes(tokens, grammar, call("weather", '{"city": "Paris", "days": "3"}'))
    assert not takes(tokens, grammar, call("other", "{}"))
    assert not takes(tokens, grammar, "I cannot.")
    named = grammar_for(BY_NAME[name], tools(), {"type": "function", "function": {"name": "weather"}})
    assert takes(tokens, named, call("weather", '{"city": "Paris"}'))
    assert not takes(tokens, named, call("weather_now", '{"exact": true, "unit": "C"}'))


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_in_other_notations(tokens: LLTokenizer, name: str) -> None:
    good, bad = WRITTEN[name]
    grammar = grammar_for(BY_NAME[name], tools(), "required")
    assert [takes(tokens, grammar, text) for text in good] == [True] * len(good)
    assert [takes(tokens, grammar, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize("name", ["lfm", "llama4"])
@examples(100)
@given(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,8}", fullmatch=True),
    st.sampled_from(["from", "class", "None", "user-id", "a b", "é", "$top", "x.y"]),
    st.text("ab=(),[]{}#'\"\\ \n", max_size=6),
)
@example("get-weather", "from", "x")
def test_names_that_are_not_pythons(tokens: LLTokenizer, name: str, function: str, key: str, value: str) -> None:
    family = BY_NAME[name]
    assert family.calls is not None
    named = tool(function, **{key: {"type": "string"}})
    reply = f"{family.calls.open}[{function}({key}={json.dumps(value, ensure_ascii=False)})]{family.calls.close}"
    assert takes(tokens, grammar_for(family, [named], "required"), reply)
    parser = Parser(family, tools=[named])
    (call,) = message_of(parser.feed(reply) + parser.end())["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (function, {key: value})


DEFINED = {
    "unit": {"type": "string", "enum": ["C", "12", 'a "b"\n']},
    "name": {"$ref": "#/$defs/text"},
    "text": {"type": "string"},
}
UNIT = {"$ref": "#/$defs/unit"}
TEXTS = st.text("ab1.\"'{}[]<>\\ \né", max_size=6)
PLAIN: list[tuple[dict[str, Any], st.SearchStrategy[Any]]] = [
    ({}, TEXTS.map(lambda text: f"a{text}")),
    ({"description": "any"}, st.sampled_from([12, None, True, {"a": ["b"]}])),
    ({"type": "string"}, TEXTS),
    ({"type": ["string", "null"]}, TEXTS | st.none()),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, TEXTS | st.none()),
    ({"type": ["string", "integer"]}, TEXTS),
    ({"$ref": "#/$defs/name"}, TEXTS),
    ({"allOf": [{"$ref": "#/$defs/name"}], "description": "who"}, TEXTS),
    (UNIT, st.sampled_from(DEFINED["unit"]["enum"])),
    ({"anyOf": [UNIT, {"type": "null"}]}, st.sampled_from([*DEFINED["unit"]["enum"], None])),
    ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, st.sampled_from(["auto", 12])),
    ({"type": ["string", "null"], "enum": ["a", None]}, st.sampled_from(["a", None])),
    ({"enum": ["1", 2, "null", True, {"a": "b"}, 'say "a"']}, st.sampled_from(["1", 2, "null", True, {"a": "b"}, 'say "a"'])),
    ({"type": ["boolean", "null"]}, st.sampled_from([True, False, None])),
    ({"type": "array", "items": UNIT}, st.lists(st.sampled_from(DEFINED["unit"]["enum"]), max_size=2)),
]
"""Schemas, and values that they allow."""


@pytest.mark.parametrize("name", XML)
@examples(200)
@given(st.data(), st.sampled_from(PLAIN), st.booleans())
def test_values_in_plain_text_are_read_as_they_were(
    tokens: LLTokenizer, name: str, data: st.DataObject, typed: tuple[dict[str, Any], st.SearchStrategy[Any]], strict: bool
) -> None:
    """A string stands without quotes wherever one is allowed, in the grammar as for the parser."""
    schema, values = typed
    value = data.draw(values)
    function = tool("weather", strict, city=schema)
    function["function"]["parameters"]["$defs"] = DEFINED
    plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    reply = WRITTEN[name][0][0].replace("Paris", plain).replace("Rome", plain)
    assert takes(tokens, grammar_for(BY_NAME[name], [function], "required"), reply)
    parser = Parser(BY_NAME[name], tools=[function])
    calls = message_of(parser.feed(reply) + parser.end())["tool_calls"]
    assert all(json.loads(call["function"]["arguments"]) == {"city": value} for call in calls)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "weather", "arguments": {"town": "Paris"}}\n</tool_call>'


def test_one_call_or_several(tokens: LLTokenizer) -> None:
    one, several = (grammar_for(BARE, tools(), "required", parallel) for parallel in (False, True))
    assert takes(tokens, one, CALL)
    assert not takes(tokens, one, f"{CALL}\n{CALL}")
    assert takes(tokens, several, f"{CALL}\n{CALL}\n{CALL}")
    assert not takes(tokens, several, f"{CALL}\n{WRONG}")
    for name in ("mistral-list", "mistral", "deepseek", "lfm", "llama"):
        texts = {
            "mistral-list": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "a"}}, '
            '{"name": "weather", "arguments": {"city": "b"}}]',
            "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "a"}[TOOL_CALLS]weather[ARGS]{"city": "b"}',
            "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "a"}<｜tool▁call▁end｜>'
            '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "b"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "lfm": '<|tool_call_start|>[weather(city="a"), weather(city="b")]<|tool_call_end|>',
            "llama": '{"name": "weather", "parameters": {"city": "a"}}; {"name": "weather", "parameters": {"city": "b"}}',
        }
        assert takes(tokens, grammar_for(BY_NAME[name], tools(), "required"), texts[name]), name
        assert not takes(tokens, grammar_for(BY_NAME[name], tools(), "required", parallel=False), texts[name]), name


def test_auto_constrains_only_what_is_strict(tokens: LLTokenizer) -> None:
    assert grammar_for(BARE, tools()) is None
    assert grammar_for(BARE, tools(strict=True), "none") is None
    assert grammar_for(BARE, None) is None
    assert grammar_for(BARE, tools(), response_format={"type": "text"}) is None
    grammar = grammar_for(BARE, tools(strict=True))
    for text in ("", "Hello.", "a <tool", "<tool>", f"Let me see.\n\n{CALL}", CALL, f"{CALL}\n{CALL}"):
        assert takes(tokens, grammar, text), text
    for text in (WRONG, f"So {WRONG}", "So <tool_call>\nno", f"{CALL}\n{WRONG}"):
        assert not takes(tokens, grammar, text), text
    assert not takes(tokens, grammar_for(BARE, tools(strict=True), parallel=False), f"{CALL}\n{CALL}")


def test_at_most_one_call_though_none_is_demanded(tokens: LLTokenizer) -> None:
    """`parallel_tool_calls: false` said nothing unless a call was demanded. Arguments stay free, as without it."""
    grammar = grammar_for(BARE, tools(), parallel=False)
    for text in ("", "Hello.", "a <tool", CALL, WRONG, f"Let me see.\n\n{CALL}"):
        assert takes(tokens, grammar, text), text
    for text in (f"{CALL}\n{CALL}", f"{CALL} and so on", CALL.replace("weather", "other")):
        assert not takes(tokens, grammar, text), text


def test_only_the_allowed_tools_are_called(tokens: LLTokenizer) -> None:
    grammar = grammar_for(BARE, tools()[:1], others=True)
    for text in ("Hello.", CALL, WRONG, f"{CALL}\n{CALL}"):
        assert takes(tokens, grammar, text), text
    for text in (CALL.replace("weather", "weather_now"), f"{CALL}\n{CALL.replace('weather', 'weather_now')}"):
        assert not takes(tokens, grammar, text), text
    nothing = grammar_for(BARE, (), others=True)
    assert takes(tokens, nothing, "Hello.")
    assert not takes(tokens, nothing, CALL)


@pytest.mark.parametrize("name", [*FORCED, *WRITTEN])
def test_every_family_can_be_kept_to_some_tools(tokens: LLTokenizer, name: str) -> None:
    if name in FORCED:
        before, middle, after = FORCED[name]
        call = f'{before}weather{middle}{{"city": "Paris"}}{after}'
    else:
        call = WRITTEN[name][0][0]
    grammar = grammar_for(BY_NAME[name], tools()[:1], others=True)
    assert takes(tokens, grammar, call)
    assert takes(tokens, grammar, "<|channel|>final<|message|>Hello." if name == "harmony" else "Hello.")
    assert not takes(tokens, grammar, call.replace("weather", "weather_now"))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "llama",
            ['{"name": "weather", "parameters": {"city": "a"}}', "Hi {", '{"city": 3}'],
            ['{"name": "Bob"}', '{ "name": 3'],
        ),
        ("llama4", ['[weather(city="a")]', "[1] see", "[a](b)"], ["[weather(town=1)]", "[other(", "[get-it/now:1("]),
        (
            "harmony",
            [
                "<|channel|>final<|message|>Hi",
                "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            ],
            ["Hi", '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"a": 1}'],
        ),
        (
            "qwen-xml",
            ["Hi", "So:\n<tool_call>\n<function=weather>\n<parameter=city>\na\n</parameter>\n</function>\n</tool_call>"],
            ["<tool_call>\n<function=weather>\n</function>\n</tool_call>", "a <function=weather>"],
        ),
        (
            "deepseek",
            [
                "Hi",
                '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "a"}<｜tool▁call▁end｜>'
                "<｜tool▁calls▁end｜>",
            ],
            ["Hi <｜tool▁calls▁begin｜>"],
        ),
    ],
)
def test_auto_in_other_families(tokens: LLTokenizer, name: str, good: list[str], bad: list[str]) -> None:
    grammar = grammar_for(BY_NAME[name], tools(strict=True))
    assert [takes(tokens, grammar, text) for text in good] == [True] * len(good)
    assert [takes(tokens, grammar, text) for text in bad] == [False] * len(bad)


def test_after_reasoning(tokens: LLTokenizer) -> None:
    family = BY_NAME["hermes"]
    grammar = grammar_for(family, tools(), "required", thinking=True)
    assert takes(tokens, grammar, f"I call <tool_call> now.\n</think>\n\n{CALL}")
    assert not takes(tokens, grammar, CALL)
    grammar = grammar_for(family, tools(), "required")
    assert takes(tokens, grammar, CALL)
    assert takes(tokens, grammar, f"<think>\nHm <tool_call>.\n</think>\n\n{CALL}")
    assert not takes(tokens, grammar, f"<think>\nHm.\n</think>\n\n{WRONG}")
    grammar = grammar_for(family, tools(strict=True))
    assert takes(tokens, grammar, "<think>\nI write <tool_call>{.\n</think>\n\nHello.")
    assert not takes(tokens, grammar, f"<think>\nHm.\n</think>\n\nOh {WRONG}")
    grammar = grammar_for(family, None, response_format={"type": "json_object"}, thinking=True)
    assert takes(tokens, grammar, 'Hm {.</think>\n\n{"a": 1}')


def test_parameters_that_a_schema_does_not_name(tokens: LLTokenizer) -> None:
    for more, taken in (({}, False), ({"additionalProperties": True}, True), ({"additionalProperties": False}, False)):
        schema = {"type": "object", "properties": {"city": {"type": "string"}}, **more}
        function = {"type": "function", "function": {"name": "weather", "parameters": schema}}
        grammar = grammar_for(BARE, [function], "required")
        assert takes(tokens, grammar, CALL)
        assert takes(tokens, grammar, CALL.replace('"Paris"', '"Paris", "town": 1')) is taken
    for schema in ({}, {"type": "object"}, None):
        function = {"type": "function", "function": {"name": "weather", "parameters": schema}}
        for name, call in (
            ("hermes", CALL),
            ("lfm", '<|tool_call_start|>[weather(a=1, b="c")]<|tool_call_end|>'),
            ("qwen-xml", "<tool_call>\n<function=weather>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
            ("gemma4", '<|tool_call>call:weather{a:1,b:{c:[<|"|>d<|"|>,null]}}<tool_call|>'),
            ("gemma4", "<|tool_call>call:weather{}<tool_call|>"),
        ):
            assert takes(tokens, grammar_for(BY_NAME[name], [function], "required"), call), name


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}, {"type": "object", "properties": {}, "required": []}])
def test_a_strict_function_without_parameters_takes_none(tokens: LLTokenizer, schema: dict[str, Any] | None) -> None:
    function = {"name": "weather", "parameters": schema, "strict": True}
    bare = {key: value for key, value in function.items() if key != "parameters"}
    for form in (function, bare) if schema is None else (function,):
        for choice in ("auto", "required"):
            grammar = grammar_for(BARE, [{"type": "function", "function": form}], choice)  # type: ignore[arg-type]
            assert takes(tokens, grammar, CALL.replace('{"city": "Paris"}', "{}"))
            assert not takes(tokens, grammar, CALL)


def test_a_strict_function_may_have_parameters_that_it_does_not_name(tokens: LLTokenizer) -> None:
    schema = {"type": "object", "additionalProperties": {"type": "string"}}
    function = {"name": "weather", "parameters": schema, "strict": True}
    grammar = grammar_for(BARE, [{"type": "function", "function": function}], "required")
    assert takes(tokens, grammar, CALL)
    assert not takes(tokens, grammar, CALL.replace('"Paris"', "3"))


NESTED = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/tree"},
        "either": {
            "anyOf": [{"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, {"const": {"a": [1]}}]
        },
        "text": {"type": ["string", "null"]},
        "none": {"type": "array", "maxItems": 0},
        "Any": {},
    },
    "$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "kind": {"enum": ["a", 1]}}}},
}


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ("{}", True),
        ('{Any:[1,<|"|>a<|"|>,{b:null}],either:[1,2],none:[],text:null,tree:{kind:1,left:{left:{kind:<|"|>a<|"|>}}}}', True),
        ('{either:{a:[1]},text:<|"|>a\nb<|"|>}', True),
        ("{either:[]}", False),
        ("{either:[1,2,3]}", False),
        ("{none:[1]}", False),
        ("{text:1}", False),
        ("{tree:{kind:2}}", False),
        ("{tree:{left:{right:{}}}}", False),
    ],
)
def test_bare_keys_inside_of_values(tokens: LLTokenizer, arguments: str, taken: bool) -> None:
    function = {"type": "function", "function": {"name": "f", "parameters": NESTED}}
    grammar = grammar_for(BY_NAME["gemma4"], [function], "required")
    assert takes(tokens, grammar, f"<|tool_call>call:f{arguments}<tool_call|>") is taken


def test_quotes_of_gemma_are_tokens(tokens: LLTokenizer) -> None:
    controls = {"<|tool_call>": 1, "<tool_call|>": 2, '<|"|>': 3, "<|channel>": 4, "<channel|>": 5}
    matcher = compiled(tokens, grammar_for(BY_NAME["gemma4"], tools(), "required", controls=controls))
    ids = [4, *tokens.tokenize_str("thought\nHm."), 5, 1, *tokens.tokenize_str("call:weather{city:"), 3]
    assert matcher.consume_tokens([*ids, *tokens.tokenize_str('Paris "a"'), 3, *tokens.tokenize_str("}"), 2])
    assert matcher.is_accepting()


def test_strings_of_python_have_no_escapes_of_json_alone(tokens: LLTokenizer) -> None:
    grammar = grammar_for(BY_NAME["llama4"], tools(), "required")
    assert takes(tokens, grammar, '[weather(city="a\\n\\u0001/")]')
    assert not takes(tokens, grammar, '[weather(city="a\\/")]')


def test_control_tokens_are_tokens(tokens: LLTokenizer) -> None:
    """With a control token as its mark, a call begins with that token, and no spelling of it does."""
    calls = ToolCallFormat("object", open="<|im_start|>", close="<|im_end|>")
    family = Family("controls", calls)
    controls = {"<|im_start|>": 1, "<|im_end|>": 2}
    body = '{"name": "weather", "arguments": {"city": "a"}}'
    for choice in ("required", "auto"):
        matcher = compiled(tokens, grammar_for(family, tools(strict=True), choice, controls=controls))  # type: ignore[arg-type]
        assert matcher.consume_tokens([1, *tokens.tokenize_str(body), 2])
        assert matcher.is_accepting()
    matcher = compiled(tokens, grammar_for(family, tools(), "required", controls=controls))
    assert matcher.validate_tokens(tokens.tokenize_str("<|im_start|>", parse_special=False)) == 0
    marked = Family("thinks", calls, THINK)
    grammar = grammar_for(marked, tools(), "required", controls={**controls, "<think>": 3, "</think>": 4}, thinking=True)
    matcher = compiled(tokens, grammar)
    assert matcher.consume_tokens([*tokens.tokenize_str("Hm."), 4, 1, *tokens.tokenize_str(body), 2])


def test_channels_of_control_tokens(tokens: LLTokenizer) -> None:
    controls = {"<|channel|>": 7, "<|message|>": 8, "<|end|>": 9, "<|start|>": 10, "<|constrain|>": 11}
    assert not set(controls.values()) & set(tokens.eos_tokens)

    def spelled(text: str) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, controls)) + ")", text)
        return [token for part in parts for token in ([controls[part]] if part in controls else tokens.tokenize_str(part))]

    def taken(text: str, choice: Any) -> bool:
        matcher = compiled(tokens, grammar_for(BY_NAME["harmony"], tools(strict=True), choice, controls=controls))
        ids = spelled(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    word = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "a"}'
    for choice in ("auto", "required"):
        assert all(taken(text, choice) for text in (call, thought + call, word + call, thought + word + call))
        assert not taken(thought + call.replace("city", "town"), choice)
        assert taken(thought + "<|channel|>final<|message|>Hi.", choice) is (choice == "auto")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            {"type": "json_object"},
            ['{"a": [1, {"b": null}]}', '{\n  "a": 1\n}', "{}"],
            ["[1]", '"a"', "{a: 1}", "text", "{" + " " * 50 + "}"],
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            ['{"name": "B", "age": 3}', '{"name":"B","age":3}', '{\n  "name": "B",\n  "age": 3\n}'],
            ['{"name": "B"}', '{"name": 1, "age": 3}', "text"],
        ),
        ({"type": "json_schema", "name": "x", "schema": SCHEMA}, ['{"name": "B", "age": 3}'], ["{}"]),
        ({"type": "regex", "regex": r"(yes|no)/[0-9]{2}\/x"}, ["yes/12/x"], ["yes/1/x", "maybe"]),
        (
            {"type": "grammar", "grammar": 'root ::= "yes" item*\nitem ::= " " [a-z]+ | "}"'},
            ["yes", "yes abc x}"],
            ["no", "yes 1"],
        ),
        ({"type": "grammar", "grammar": 'start: "a" WORD "}"\nWORD: /[b-d{]+/'}, ["abc}", "a{}"], ["abc", "xyz"]),
    ],
)
def test_answers(tokens: LLTokenizer, form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = grammar_for(BARE, None, response_format=form)
    assert [takes(tokens, grammar, text) for text in good] == [True] * len(good)
    assert [takes(tokens, grammar, text) for text in bad] == [False] * len(bad)
    grammar = grammar_for(BY_NAME["hermes"], None, response_format=form, thinking=True)
    assert takes(tokens, grammar, f"Hm.\n</think>\n\n{good[0]}")
    grammar = grammar_for(BY_NAME["harmony"], None, response_format=form)
    assert takes(tokens, grammar, f"<|channel|>final<|message|>{good[0]}")


def test_a_call_or_an_answer_in_its_form(tokens: LLTokenizer) -> None:
    grammar = grammar_for(BARE, tools(), response_format={"type": "json_object"})
    assert takes(tokens, grammar, CALL)
    assert takes(tokens, grammar, '{"a": 1}')
    assert not takes(tokens, grammar, "Hello.")
    assert not takes(tokens, grammar, WRONG)


def test_contradictions_are_the_request_s() -> None:
    with pytest.raises(InvalidRequest, match="nobody"):
        grammar_for(BARE, tools(), {"type": "function", "function": {"name": "nobody"}})
    with pytest.raises(InvalidRequest, match="no tools"):
        grammar_for(BARE, [], "required")
    with pytest.raises(InvalidRequest, match="response_format"):
        grammar_for(BARE, None, response_format={"type": "poem"})
    with pytest.raises(InvalidRequest, match="grammar"):
        grammar_for(BARE, None, response_format={"type": "grammar", "grammar": "root ::= ("})


def test_strict_schemas_must_be_understood(tokens: LLTokenizer) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (False, True):
        grammar = grammar_for(BARE, None, response_format={"type": "json_schema", "schema": odd, "strict": strict})
        assert grammar is not None
        assert LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar.text), log_level=0).is_error() is strict


RANDOM_TOOLS = [
    tool(
        "book",
        True,
        id={"type": "integer", "minimum": -9, "maximum": 99},
        kind={"enum": ["a", "b\n", 'c"', "é"]},
        paid={"type": "boolean", "optional": True},
        name={"type": "string", "maxLength": 8, "optional": True},
        tags={"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2, "optional": True},
    ),
    tool("list.all", True),
]
RANDOM_TOOLS[0]["function"]["parameters"]["$defs"] = {"tag": {"enum": [1, "x", None]}}


def written(tokens: LLTokenizer, matcher: LLMatcher, dice: random.Random, start: str = "") -> str | None:
    """What a model writes that takes any token which the grammar leaves; None if it does not come to an end."""
    ids: list[int] = tokens.tokenize_str(start)
    assert matcher.consume_tokens(ids)
    while not matcher.is_stopped() and len(ids) < 160:
        allowed = np.setdiff1d(np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8)), tokens.eos_tokens)
        if matcher.is_accepting() and (not len(allowed) or dice.random() < 0.5):
            break
        ids.append(int(dice.choice(allowed)))
        assert matcher.consume_token(ids[-1])
    return str(tokens.decode_str(ids)) if matcher.is_accepting() else None


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_whatever_a_model_writes_is_a_valid_call(tokens: LLTokenizer, name: str) -> None:
    dice = random.Random(name)
    family = BY_NAME[name]
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in RANDOM_TOOLS}
    grammar = grammar_for(Family(name, family.calls), RANDOM_TOOLS, "required", parallel=False)
    start = "<|channel|>commentary to=functions." if name == "harmony" else ""  # before it comes any text
    replies = [written(tokens, compiled(tokens, grammar), dice, start) for _ in range(8)]
    whole = [reply for reply in replies if reply is not None]
    assert len(whole) >= 2
    for reply in whole:
        parser = Parser(family, tools=RANDOM_TOOLS)
        message = message_of(parser.feed(reply) + parser.end())
        (call,) = message["tool_calls"]
        assert message["content"] == ""
        arguments = json.loads(call["function"]["arguments"])
        if family.calls is not None and family.calls.syntax in ("xml", "keyed"):
            arguments.pop("name", None)  # free text
        jsonschema_rs.validate(schemas[call["function"]["name"]], arguments)


def value_of(text: str) -> Any:
    """The JSON value; numbers beyond Python's floats are the largest of them, not infinite, which JSON has not."""
    return json.loads(text, parse_float=lambda number: max(-1e308, min(1e308, float(number))))


def some_schema(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["integer", "number", "boolean", "string", "enum", "null", "const", "several", "defined"]
    match dice.choice(kinds if depth > 2 else [*kinds, "array", "object", "object", "union"]):
        case "integer":
            low = dice.randint(-50, 50)
            return {
                "type": "integer",
                **dice.choice([{}, {"minimum": low}, {"minimum": low, "maximum": low + dice.randint(0, 99)}]),
            }
        case "number":
            return {"type": "number", **dice.choice([{}, {"minimum": -1.5}, {"exclusiveMaximum": 10}])}
        case "string":
            limits: list[dict[str, Any]] = [{"maxLength": 6}, {"pattern": "^[a-c]{1,4}$"}, {"minLength": 1, "maxLength": 3}]
            return {"type": "string", **dice.choice([*limits, {"format": "date"}])}
        case "enum":
            return {"enum": dice.sample(["a", "é\n", '"', 1, -2.5, None, True, [1], {"k": "v"}], 3)}
        case "const":
            return {"const": dice.choice(["x\\y", 0, False, None])}
        case "several":
            return {"type": dice.choice([["integer", "null"], ["boolean", "null"]])}
        case "defined":
            return dice.choice([UNIT, {"allOf": [UNIT]}, {"anyOf": [UNIT, {"type": "integer"}]}])
        case "array":
            return {"type": "array", "items": some_schema(dice, depth + 1), "minItems": dice.randint(0, 1), "maxItems": 2}
        case "union":
            return {"anyOf": [some_schema(dice, depth + 1) for _ in range(2)]}
        case "object":
            return some_object(dice, depth + 1)
        case kind:
            return {"type": kind}


def some_object(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    names = dice.sample(["path", "Zahl", "a b", "é", 'q"', "n1", "_"], dice.randint(0, 4))
    properties = {name: some_schema(dice, depth) for name in names}
    required = [name for name in names if dice.random() < 0.7]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return schema if depth else {**schema, "$defs": {"unit": DEFINED["unit"]}}


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_schemas(tokens: LLTokenizer, count: int) -> None:
    """Of tools and of answers: what is written is valid by its schema."""
    dice = random.Random(count)
    whole = 0
    for number in range(count):
        schema = some_object(dice)
        function = {"name": f"f{number}", "parameters": schema, "strict": True}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        called = grammar_for(BARE, [{"type": "function", "function": function}], "required", parallel=False)
        reply = written(tokens, compiled(tokens, called), dice)
        if reply is not None:
            parser = Parser(BARE, tools=True)
            (call,) = message_of(parser.feed(reply) + parser.end())["tool_calls"]
            assert call["function"]["name"] == f"f{number}"
            jsonschema_rs.validate(schema, value_of(call["function"]["arguments"]))
        answer = written(tokens, compiled(tokens, grammar_for(BARE, None, response_format=form)), dice)
        if answer is not None:
            jsonschema_rs.validate(schema, value_of(answer))
        whole += (reply is not None) + (answer is not None)
    assert whole > count  # more than half of them come to an end


def without_limits(schema: Any) -> Any:
    """A schema whose strings are any, and whose numbers are small: one beyond all floats is read as text."""
    if isinstance(schema, list):
        return [*map(without_limits, schema)]
    if not isinstance(schema, dict):
        return schema
    match schema.get("type"):
        case "string" if "enum" not in schema:
            return {"type": "string"}
        case "number":
            return {"type": "number", "minimum": -9, "maximum": 9}
    return {key: without_limits(one) for key, one in schema.items()}


@pytest.mark.parametrize("name", ["gemma4", *XML])
@pytest.mark.parametrize("count", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_random_schemas_in_other_notations(tokens: LLTokenizer, name: str, count: int) -> None:
    dice = random.Random(count)
    whole = 0
    family = Family("other", BY_NAME[name].calls)
    for number in range(count):
        schema = without_limits(some_object(dice))
        tool = {"type": "function", "function": {"name": f"f{number}", "parameters": schema, "strict": True}}
        reply = written(tokens, compiled(tokens, grammar_for(family, [tool], "required", parallel=False)), dice)
        if reply is not None:
            (call,) = message_of([*(parser := Parser(family, tools=[tool])).feed(reply), *parser.end()])["tool_calls"]
            jsonschema_rs.validate(schema, value_of(call["function"]["arguments"]))
            whole += 1
    assert whole > count // 2


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {}}, "required": [{}]},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a": {"type": "string", "enum": None}}},
    ],
)
def test_schemas_that_make_no_sense_are_no_error_of_ours(family: Family, strict: bool, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
    assert grammar_for(family, [tool], "required") is not None


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_any_number_of_definitions_may_lead_to_one_another(family: Family) -> None:
    definitions: dict[str, Any] = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(2000)}
    parameters = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {**definitions, "2000": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert grammar_for(family, [tool], "required") is not None
