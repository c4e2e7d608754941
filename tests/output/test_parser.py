"""Replies in the forms that models write, whole and in pieces."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from effort import examples
from headstart.output.parser import Parser, ReasoningDelta, ReplyDelta, TextDelta, ToolCallDelta, ToolCallStart, message_of
from headstart.prompt.family_detection import FAMILIES, GENERIC, PLAIN, REASONINGS, THINK, Family

BY_NAME = {family.name: family for family in (*FAMILIES, GENERIC, PLAIN)}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "where": {"type": "object"},
                "note": {"type": ["string", "null"]},
                "code": {"$ref": "#/$defs/code"},
                "unit": {"enum": ["C", 12, None]},
                "zip": {"anyOf": [{"$ref": "#/$defs/code"}, {"type": "null"}]},
            },
            "$defs": {"code": {"type": "string"}},
        },
    },
}


def parse(
    family: str | Family, *parts: str, tools: Any = (TOOL,), thinking: bool = False, cut: bool = False
) -> list[ReplyDelta]:
    parser = Parser(family if isinstance(family, Family) else BY_NAME[family], tools=tools, thinking=thinking)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return pieces + parser.end(cut=cut)


def told(*arguments: Any, **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and calls with the texts of their arguments."""
    message = message_of(parse(*arguments, **options))
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"], message.get("reasoning_content", ""), calls


PARIS = '{"city": "Paris", "days": 3}'
ROME = '{"city":"Rome}</tool_call>"}'

CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        f'Look.\n\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
        "Look.",
        [("weather", PARIS)],
    ),
    (
        "hermes",
        f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
        f'<tool_call>{{"arguments": {ROME}, "name": "other"}}</tool_call>',
        "",
        [("weather", PARIS), ("other", ROME)],
    ),
    (
        "qwen-xml",
        "So:\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=other>\n</function>\n</tool_call>",
        "So:",
        [("weather", PARIS), ("other", "{}")],
    ),
    (
        "seed",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n</function>\n"
        "</seed:tool_call>",
        "",
        [("weather", PARIS)],
    ),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">3'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
        "",
        [("weather", PARIS)],
    ),
    (
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3"
        "</arg_value>\n</tool_call>",
        "",
        [("weather", PARIS)],
    ),
    (
        "glm",
        "Hm.<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3</arg_value>"
        "</tool_call><tool_call>other</tool_call>",
        "Hm.",
        [("weather", PARIS), ("other", "{}")],
    ),
    (
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]other[CALL_ID]123456789[ARGS]{{}}",
        "",
        [("weather", PARIS), ("other", "{}")],
    ),
    (
        "mistral-list",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}, "id": "x"}}, {{"name": "other", "arguments": {{}}}}]',
        "",
        [("weather", PARIS), ("other", "{}")],
    ),
    ("phi", f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}]<|/tool_call|>', "", [("weather", PARIS)]),
    (
        "nemotron",
        f'I look.\n\n<TOOLCALL>[{{"name": "weather", "arguments": {PARIS}}},{{"name": "other", "arguments": {{}}}}]</TOOLCALL>',
        "I look.",
        [("weather", PARIS), ("other", "{}")],
    ),
    ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}]', "", [("weather", PARIS)]),
    (
        "cohere",
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {PARIS}}}\n]<|END_ACTION|>',
        "",
        [("weather", PARIS)],
    ),
    (
        "deepseek-r1",
        "Go.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>other\n```json\n{{}}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "Go.",
        [("weather", PARIS), ("other", "{}")],
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>other<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("weather", PARIS), ("other", "{}")],
    ),
    (
        "kimi",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{PARIS}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [("weather", PARIS)],
    ),
    (
        "lfm",
        'I look.<|tool_call_start|>[weather(city="Paris", days=3), other(a=[1, None], b={"c": True})]<|tool_call_end|>',
        "I look.",
        [("weather", PARIS), ("other", '{"a": [1, null], "b": {"c": true}}')],
    ),
    ("lfm", f'<|tool_call_start|>[{{"name": "weather", "arguments": {PARIS}}}]<|tool_call_end|>', "", [("weather", PARIS)]),
    ("lfm-json", "<|tool_call_start|>[weather(city='Paris', days=3)]<|tool_call_end|>", "", [("weather", PARIS)]),
    ("phi", f'<|tool_call|>{{"name": "weather", "arguments": {PARIS}}}<|/tool_call|>', "", [("weather", PARIS)]),
    (
        "hermes",
        f'<tool_call>\n[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "other", "arguments": {{}}}}]\n</tool_call>',
        "",
        [("weather", PARIS), ("other", "{}")],
    ),
    ("llama4", "[weather(city='Paris', days=3)]", "", [("weather", PARIS)]),
    ("llama4", "<|python_start|>[weather('Paris', days=3)]<|python_end|>", "", [("weather", PARIS)]),
    (
        "lfm",
        "<|tool_call_start|>[weather(city='a\n\tb\\n(c', days=3)]<|tool_call_end|>",
        "",
        [("weather", r'{"city": "a\n\tb\n(c", "days": 3}')],
    ),
    ("llama4", "[get-it(from='a'), b.c:d/e(user-id=1)]", "", [("get-it", '{"from": "a"}'), ("b.c:d/e", '{"user-id": 1}')]),
    ("llama", f'{{"name": "weather", "parameters": {PARIS}}}', "", [("weather", PARIS)]),
    (
        "llama",
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {PARIS}}}; '
        '{"name": "other", "parameters": {}}',
        "",
        [("weather", PARIS), ("other", "{}")],
    ),
    (
        "harmony",
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{PARIS}<|call|>",
        "I look.",
        [("weather", PARIS)],
    ),
    ("harmony", f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}", "", [("weather", PARIS)]),
]
BARE_KEYS = [
    (
        'I look.<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:other{}<tool_call|>',
        "I look.",
        [("weather", PARIS), ("other", "{}")],
    ),
    (
        '<|tool_call>call:other{a:<|"|>x "y"\n{,<|"|>,b:[<|"|><|"|>,-2.5,true,None,'
        '[],{k:{}}],c:{d e:null,f:<|"|>}<|"|>}}<tool_call|>',
        "",
        [("other", r'{"a": "x \"y\"\n{,", "b": ["", -2.5, true, null, [], {"k": {}}], "c": {"d e": null, "f": "}"}}')],
    ),
    (  # as models err: blanks, other quotes, commas too many or too few, a string without quotes
        '<|tool_call>call: weather {\n "city" : "Rome", \n<|"|>days<|"|>: 3 ,exact:True,x:as is,'
        "where:{a:1,}, y:[1 ,]} <tool_call|>.",
        ".",
        [("weather", '{"city": "Rome", "days": 3, "exact": true, "x": "as is", "where": {"a": 1}, "y": [1]}')],
    ),
    ('<|tool_call>call:other{q":1,é:2}<tool_call|>', "", [("other", r'{"q\"": 1, "é": 2}')]),
    ("<|tool_call>call:weather{city:3,days:4,code:5}<tool_call|>", "", [("weather", '{"city": "3", "days": 4, "code": "5"}')]),
]
CASES += [("gemma4", *case) for case in BARE_KEYS]
IDS = [f"{number}-{case[0]}" for number, case in enumerate(CASES)]


@pytest.mark.parametrize(("family", "reply", "content", "calls"), CASES, ids=IDS)
def test_calls(family: str, reply: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert told(family, reply) == (content, "", calls)
    assert told(family, *reply) == (content, "", calls)


@pytest.mark.parametrize(("family", "reply", "content", "calls"), CASES, ids=IDS)
def test_without_tools_calls_are_text(family: str, reply: str, content: str, calls: list[tuple[str, str]]) -> None:
    got, _, none = told(family, reply, tools=())
    assert none == []
    assert PARIS in got if family == "harmony" else got == reply


@pytest.mark.parametrize(("family", "reply", "content", "calls"), CASES, ids=IDS)
def test_every_beginning_of_a_reply_gives_a_beginning(
    family: str, reply: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """A reply that breaks off anywhere: its calls are the first of the whole, their arguments as far as they came."""
    if family == "harmony":
        pytest.skip("its marks are control tokens, which come whole")
    for end in range(len(reply)):
        _, _, got = told(family, reply[:end])
        assert len(got) <= len(calls)
        for (name, arguments), (whole, text) in zip(got, calls, strict=False):
            assert name == whole
            assert text.startswith(arguments)


@pytest.mark.parametrize(("family", "reply", "content", "calls"), CASES, ids=IDS)
def test_every_cut_reply_says_a_beginning_of_what_the_whole_one_says(
    family: str, reply: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """Wherever `max_tokens` or a stop text ends it, no mark is said or thought, nor a call that has only begun."""
    reasoning = BY_NAME[family].reasoning
    thought = "Hm.\n\nSo <b>." if reasoning is not None else ""
    if reasoning is not None:
        reply = f"{reasoning.open}\n{thought}\n{reasoning.close}\n\n{reply}"
    controls = [(one.start(), one.end()) for one in re.finditer(r"<\|.*?\|>", reply)] if family == "harmony" else []
    for end in range(len(reply) + 1):
        if any(begin < end < behind for begin, behind in controls):
            continue  # control tokens come whole
        got = told(family, reply[:end], cut=True)
        assert content.startswith(got[0].strip())
        assert thought.startswith(got[1].strip())
        assert all(name == whole and text.startswith(said) for (name, said), (whole, text) in zip(got[2], calls, strict=False))
        assert told(family, *reply[:end], cut=True) == got
    assert got == (content, thought, calls)


@pytest.mark.parametrize(
    ("family", "reply", "thinking"),
    [
        ("hermes", "A cow <tool", False),
        ("hermes", "<thi", False),
        ("plain", "A cow.\n</thi", True),
        ("qwen-xml", "<functio", False),
        ("mistral", "See [TOOL_", False),
        ("seed", "A <seed:tool", False),
        ("llama", '{"name": "wea', False),
        ("llama4", "[weather(city='Par", False),
    ],
)
def test_the_beginning_of_a_mark_is_text_where_the_model_has_ended(family: str, reply: str, thinking: bool) -> None:
    said = told(family, reply, thinking=thinking)
    assert said[0] + said[1] == reply
    said = told(family, reply, thinking=thinking, cut=True)
    assert said[0] + said[1] in reply.partition(reply.split()[-1])[0]


def test_words_are_said_also_where_a_mark_might_begin_with_them() -> None:
    granite = Family("granite-thinks", reasoning=REASONINGS[-1])
    assert told(granite, "Here is my", cut=True) == ("Here is my", "", [])
    assert told(granite, "Hm. Here is", thinking=True, cut=True) == ("", "Hm. Here is", [])


def joined(pieces: list[ReplyDelta]) -> list[tuple[Any, ...]]:
    """Pieces without the seams between those of one kind."""
    whole: list[list[Any]] = []
    for piece in pieces:
        match piece:
            case ToolCallStart(index, name):
                whole.append(["call", index, name])
            case ToolCallDelta(index, text):
                key = ["arguments", index]
                whole.append([*key, text]) if not whole or whole[-1][:2] != key else whole[-1].append(text)
            case TextDelta(text) | ReasoningDelta(text):
                kind = [type(piece).__name__]
                whole.append([*kind, text]) if not whole or whole[-1][:1] != kind else whole[-1].append(text)
    return [(parts[0], "".join(map(str, parts[1:]))) for parts in whole]


FRAGMENTS = sorted(
    {mark for family in FAMILIES for mark in family.visible}
    | {
        "<think>",
        "</think>",
        "\n",
        " ",
        "{",
        "}",
        '"',
        ",",
        ":",
        "[",
        "]",
        "(",
        ")",
        "name",
        "weather",
        "functions.",
        "to=",
        ">",
    }
    | {
        '{"name": "weather", ',
        '"arguments": ',
        '"parameters": ',
        PARIS,
        "text",
        "\\",
        "</tool",
        "<",
        "<|",
        "[TOOL",
        "call:f{a:",
        '"a\t\\"b\n"',
        "city",
        "=",
    }
    | {"[weather(", "city='a'", "analysis", "commentary", "assistant", "```json", "function", ";", "3"}
)


@examples(400)
@given(
    st.sampled_from(sorted(BY_NAME)),
    st.one_of(st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join), st.sampled_from([case[1] for case in CASES])),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_no_cut_matters(name: str, reply: str, cuts: list[int], tools: bool, thinking: bool) -> None:
    whole = parse(name, reply, tools=tools, thinking=thinking)
    ends = [0, *sorted(cut % (len(reply) + 1) for cut in cuts), len(reply)]
    parts = [reply[one:other] for one, other in pairwise(ends)]
    assert joined(parse(name, *parts, tools=tools, thinking=thinking)) == joined(whole)
    assert joined(parse(name, *reply, tools=tools, thinking=thinking)) == joined(whole)


@examples(300)
@given(st.sampled_from(sorted(set(BY_NAME) - {"harmony"})), st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join))
@example("hermes", '<tool_call>\n{"name": "f"')
def test_what_is_no_call_is_text(name: str, reply: str) -> None:
    """Without a call and without reasoning, what goes out is what came in."""
    pieces = parse(BY_NAME[name], reply)
    if all(isinstance(piece, TextDelta) for piece in pieces) and "think" not in reply.lower():
        assert message_of(pieces)["content"] == reply


def test_nothing_that_a_model_writes_is_an_error() -> None:
    deep = 100_000
    for reply in (
        '<tool_call>{"function": ' * 5_000,
        '<tool_call>{"a": {' * 2_000,
        '<tool_call>{"name": "f", "arguments": ' + "[" * deep,
        '<tool_call>{"name": "\\ud800", "arguments": "{\\ud83d\\ude00\\ud800"}</tool_call>',
    ):
        message = message_of(parse("hermes", reply))
        json.dumps(message, ensure_ascii=False).encode()
    assert told("hermes", reply)[2] == [("\ufffd", "{\U0001f600\ufffd")]
    assert told("lfm", "<|tool_call_start|>[f(a=" + "[" * deep)[2] == []
    assert told("lfm", "<|tool_call_start|>[f(a=" + "-" * deep + "1)]<|tool_call_end|>")[2] == []
    assert told("lfm", "<|tool_call_start|>[f(" * 2_000)[2] == []
    value = "[" * deep + "]" * deep
    assert told("glm", f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>")[2] == [
        ("f", json.dumps({"a": value}))
    ]


def test_text_without_tools_goes_out_as_it_comes() -> None:
    parser = Parser(BY_NAME["hermes"])
    assert parser.feed("a ") == [TextDelta("a ")]
    assert parser.feed("\n<tool") == [TextDelta("\n<tool")]


def test_arguments_stream_as_they_are_written() -> None:
    parser = Parser(BY_NAME["hermes"], tools=True)
    assert parser.feed('Well <tool_call>\n{"name": "f", "argu') == [TextDelta("Well")]
    assert parser.feed('ments": {"a": "x') == [ToolCallStart(0, "f"), ToolCallDelta(0, '{"a": "x')]
    assert parser.feed('y}"') == [ToolCallDelta(0, 'y}"')]
    assert parser.feed("}}\n</tool_call> ") == [ToolCallDelta(0, "}")]
    assert parser.end() == []


RAW = '{"text":\t"a\n\tb\\n\r\x0c\x00\\"c\n\\\\",\n "list": ["\x1f", {"k\n": "\u00e9"}]}'
READ = {"text": 'a\n\tb\n\r\x0c\x00"c\n\\', "list": ["\x1f", {"k\n": "\u00e9"}]}


@pytest.mark.parametrize(("family", "reply", "content", "calls"), CASES, ids=IDS)
def test_arguments_are_json_though_their_strings_have_raw_line_breaks(
    family: str, reply: str, content: str, calls: list[tuple[str, str]]
) -> None:
    if PARIS not in reply:
        pytest.skip("its arguments are not written as JSON")
    reply = reply.replace(PARIS, RAW)
    assert [name for name, _ in told(family, reply)[2]] == [name for name, _ in calls]
    assert json.loads(told(family, reply)[2][0][1]) == READ
    assert told(family, *reply) == told(family, reply)


def test_arguments_in_a_string_are_json_too() -> None:
    for reply in (f'{{"name": "f", "arguments": {json.dumps(RAW)}}}', f'{{"arguments": {RAW}, "name": "f"}}'):
        assert [json.loads(text) for _, text in told("hermes", f"<tool_call>{reply}</tool_call>")[2]] == [READ]


def test_a_line_break_in_a_string_streams() -> None:
    parser = Parser(BY_NAME["hermes"], tools=True)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {\n"a": "x\n')[1:] == [ToolCallDelta(0, '{\n"a": "x\\n')]
    assert parser.feed("\\") == [ToolCallDelta(0, "\\")]
    assert parser.feed('"\t') == [ToolCallDelta(0, '"\\t')]


def test_text_streams_but_for_the_beginning_of_a_mark() -> None:
    parser = Parser(BY_NAME["hermes"], tools=True)
    assert parser.feed("a < b") == [TextDelta("a < b")]
    assert parser.feed(" <tool") == []
    assert parser.feed("s>") == [TextDelta(" <tools>")]
    llama = Parser(BY_NAME["llama"], tools=True)
    assert llama.feed('{"name": "Bob", "a') == []
    assert llama.feed('ge": 3}') == [TextDelta('{"name": "Bob", "age": 3}')]


@pytest.mark.parametrize(
    ("reply", "thinking", "expected"),
    [
        ("<think>\nHm.\n\nSo.\n</think>\n\nYes.", False, ("Yes.", "Hm.\n\nSo.")),
        ("Hm.\n</think>\n\nYes.\n", True, ("Yes.\n", "Hm.")),
        ("\n\n</think>\n\nYes.", True, ("Yes.", "")),
        ("<think>\n\n</think>\n\n  Yes.", False, ("  Yes.", "")),
        ("Hm", True, ("", "Hm")),
        ("I write <think>this</think>.", False, ("I write <think>this</think>.", "")),
        (" No.", False, (" No.", "")),
    ],
)
def test_reasoning(reply: str, thinking: bool, expected: tuple[str, str]) -> None:
    assert told("plain", reply, thinking=thinking)[:2] == expected
    assert told("plain", *reply, thinking=thinking)[:2] == expected


def test_reasoning_then_a_call() -> None:
    reply = f'Let me <tool_call>.\n</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
    assert told("hermes", reply, thinking=True) == ("", "Let me <tool_call>.", [("weather", PARIS)])


def test_reasoning_of_harmony() -> None:
    reply = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert told("harmony", reply) == ("Yes.", "Hm.", [])
    assert told("harmony", "Just text.") == ("Just text.", "", [])
    parser = Parser(BY_NAME["harmony"])
    assert parser.feed("Just") == [TextDelta("Just")]


@pytest.mark.parametrize(
    ("reply", "content", "calls"),
    [
        ("<tool_call>\nnot JSON\n</tool_call>", "<tool_call>\nnot JSON\n</tool_call>", []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            [],
        ),
        (
            '<tool_call>{"name": "f", "arguments": "s"}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "s"}</tool_call>',
            [],
        ),
        (
            '<tool_call>{"arguments": "s", "name": "f"}</tool_call>',
            '<tool_call>{"arguments": "s", "name": "f"}</tool_call>',
            [],
        ),
        ('<tool_call>{"function": {"name": "f", "arguments": {}}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}} and so on', "and so on", [("f", "{}")]),
        ('A\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nB\n', "A\nB", [("f", "{}")]),
        ('<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool', "", [("f", "{}")]),
        # A brace too many, and several calls between one pair of markers.
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {}}}} }', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}} and so on', "} and so on", [("f", "{}")]),
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g"},{"name": "h", "arguments": {}}}\n</tool_call>\n'
            '<tool_call>{"name": "i"}</tool_call>B',
            "B",
            [("f", '{"a": 1}'), ("g", "{}"), ("h", "{}"), ("i", "{}")],
        ),
        ('<tool_call>{"name": "f", "arguments": {}}\n{"name": "g", "argu', "", [("f", "{}")]),
        ('<tool_call>{"name": "f"}\n{"age": 3} </tool_call>', '{"age": 3} </tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": "f"}, {</tool_call>', ", {</tool_call>", [("f", "{}")]),
        # What waited for its end in vain is text with all that follows.
        ('<tool_call>{"a": {<tool_call>{"name": "f"}', '<tool_call>{"a": {<tool_call>{"name": "f"}', []),
    ],
)
def test_malformed_calls(reply: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert told("hermes", reply) == (content, "", calls)
    assert told("hermes", *reply) == (content, "", calls)


@pytest.mark.parametrize(
    ("reply", "content", "calls"),
    [
        ("<|tool_call>weather", "<|tool_call>weather", []),
        ("<|tool_call>call:two words{}<tool_call|>", "<|tool_call>call:two words{}<tool_call|>", []),
        ("<|tool_call>call:f{a}<tool_call|>", "a}<tool_call|>", [("f", "{")]),
        ("<|tool_call>call:f{a:1", "", [("f", '{"a": ')]),
        ("<|tool_call>call:f{a:1,b", "", [("f", '{"a": 1')]),
        ('<|tool_call>call:f{a:<|"|>x<|', "", [("f", '{"a": "x')]),
        ('<|tool_call>call:f{a:"x\\', "", [("f", '{"a": "x\\')]),
        ("<|tool_call>call:f{a:1}", "", [("f", '{"a": 1}')]),
        ("<|tool_call>call:f{a:1} So", "So", [("f", '{"a": 1}')]),
    ],
)
def test_malformed_calls_with_bare_keys(reply: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert told("gemma4", reply) == (content, "", calls)
    assert told("gemma4", *reply) == (content, "", calls)


def test_any_number_of_brackets_is_no_error() -> None:
    for bracket in ("[", "{a:"):
        ((name, arguments),) = told("gemma4", "<|tool_call>call:f{a:" + bracket * 50_000)[2]
        assert (name, len(arguments) > 50_000) == ("f", True)


def test_a_string_with_bare_keys_streams() -> None:
    parser = Parser(BY_NAME["gemma4"], tools=True)
    assert parser.feed('<|tool_call>call:f{a:<|"|>x\n') == [ToolCallStart(0, "f"), ToolCallDelta(0, '{"a": "x\\n')]
    assert parser.feed('y<|"|>,b:1') == [ToolCallDelta(0, 'y", "b": ')]
    assert parser.feed("2}") == [ToolCallDelta(0, "12}")]


def test_reasoning_of_gemma() -> None:
    reply = "<|channel>thought\nHm.\n<channel|>Yes.<|tool_call>call:f{}<tool_call|>"
    assert told("gemma4", reply) == told("gemma4", *reply) == ("Yes.", "Hm.", [("f", "{}")])
    assert told("gemma4", "<|channel>thought\n<channel|>Yes.") == ("Yes.", "", [])


@pytest.mark.parametrize(
    ("family", "begun"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>\n{"name": "'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments"'),
        ("qwen-xml", "<tool_call>\n<function=rea"),
        ("mistral", "[TOOL_CALLS]rea"),
        ("gemma4", "<|tool_call>call:rea"),
        ("harmony", "<|start|>assistant<|channel|>commentary to=functions.f"),
    ],
)
def test_a_call_that_has_only_begun_is_left_out_where_it_was_cut(family: str, begun: str) -> None:
    for before in ("", "Let me see.\n") if family != "harmony" else ("<|channel|>final<|message|>Let me see.",):
        said = before.rpartition(">")[2].strip()
        parser = Parser(BY_NAME[family], tools=(TOOL,))
        pieces = [*parser.feed(before + begun), *parser.end(cut=True)]
        assert message_of(pieces) == {"role": "assistant", "content": said}
        parser = Parser(BY_NAME[family], tools=(TOOL,))
        assert begun[:11] in message_of([*parser.feed(before + begun), *parser.end()])["content"]


def test_a_second_call_that_has_only_begun_is_left_out() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert told("hermes", call + '\n<tool_call>\n{"name": "f"') == ("", "", [("f", "{}")])
    assert told("hermes", call + "\n<tool_call>no JSON</tool_call>")[0] == "<tool_call>no JSON</tool_call>"


def test_types_come_from_the_schema() -> None:
    def one(key: str, text: str) -> Any:
        reply = f"<tool_call>\n<function=weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
        return json.loads(told("qwen-xml", reply)[2][0][1])[key]

    assert one("city", "3") == "3"
    assert one("city", "\n a\n\n") == "\n a\n\n"
    assert one("days", "3") == 3
    assert one("days", "many") == "many"
    assert one("exact", "True") is True
    assert one("where", "{'a': [1, None]}") == {"a": [1, None]}
    assert one("where", '{"a": 1e999}') == '{"a": 1e999}'
    assert one("note", "null") is None
    assert one("note", "None") is None
    assert one("note", "None of it") == "None of it"
    assert one("note", "1") == "1"
    assert one("city", "None") == "None"
    assert one("code", "12") == one("zip", "12") == "12"
    assert one("zip", "null") is None
    assert one("unknown", "1") == 1
    assert one("unknown", '"quoted"') == '"quoted"'


def test_xml_that_breaks_off_stays_as_far_as_it_came() -> None:
    head = "<function=weather>\n<parameter=city>\nPar"
    assert told("qwen-xml", head) == ("", "", [("weather", '{"city": "Par')])
    assert told("qwen-xml", head + "is\n</parameter>\n</func") == ("", "", [("weather", '{"city": "Paris"')])
    assert told("qwen-xml", head + "is\n</parameter>\n</tool_call>") == (
        "",
        "",
        [("weather", '{"city": "Paris"}')],
    )


@examples(200)
@given(
    st.sampled_from(["city", "note", "zip", "unit", "unknown"]),
    st.lists(st.sampled_from(["null", "None", "nu", "C", "12", "true", " ", "\n", '"', "é", "<"]), max_size=4).map("".join),
)
@example("note", "None")
@example("unknown", "12")
def test_a_value_that_breaks_off_is_a_beginning_of_the_whole_one(key: str, text: str) -> None:
    head = f"<function=weather>\n<parameter={key}>\n"
    ((_, whole),) = told("qwen-xml", f"{head}{text}\n</parameter>\n</function>")[2]
    for end in range(len(text) + 1):
        ((_, arguments),) = told("qwen-xml", head + text[:end])[2]
        assert whole.startswith(arguments)


def test_the_message_has_what_a_client_sends_back() -> None:
    pieces = parse("hermes", f'<think>\nA\n</think>\n\nB\n<tool_call>\n{{"name": "f", "arguments": {PARIS}}}\n</tool_call>')
    assert message_of(pieces, ["call_a"]) == {
        "role": "assistant",
        "content": "B",
        "reasoning_content": "A",
        "tool_calls": [{"id": "call_a", "type": "function", "function": {"name": "f", "arguments": PARIS}}],
    }
    assert message_of([]) == {"role": "assistant", "content": ""}


def test_no_mark_begins_with_another() -> None:
    """What is looked for at one place is told apart by its own text, however much of it is there."""
    for family in FAMILIES:
        assert family.calls is not None
        marks = [mark for mark in (family.calls.begin, family.calls.open) if mark]
        assert not any(one != other and one.startswith(other) for one in marks for other in marks)
    assert THINK.open != THINK.close


@pytest.mark.parametrize("blank", ["", "f(a=1)"])
def test_what_is_too_long_for_a_name_is_text_at_once(blank: str) -> None:
    """Else each further character would be read together with all before it."""
    text = f"<|tool_call_start|>[{blank}{'a' * 1000}"
    parser = Parser(BY_NAME["lfm"], tools=[TOOL])
    assert "".join(piece.text for piece in parser.feed(text) if isinstance(piece, TextDelta)) == text
    assert told("lfm", *text, "(b=2)]<|tool_call_end|>") == (f"{text}(b=2)]<|tool_call_end|>", "", [])
