"""/v1/chat/completions through the vendor's own SDK: tools, reasoning, formats, and what they cost on the next turn."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from harness import check
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from live import Server, serving, wait_until
from scripted import Scripted
from templates import TOOLS

LS = {
    "type": "function",
    "function": {
        "name": "ls",
        "description": "Lists a folder.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 8}, "all": {"type": "boolean"}},
            "required": ["path", "all"],
            "additionalProperties": False,
        },
    },
}
CAT = {"type": "function", "function": {"name": "cat", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "ls", "arguments": {"all":true,"path":"/etc"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "cat", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nThey want to know what there is.\n</think>\n\n"
ASK: list[Any] = [
    {"role": "system", "content": "You are a careful assistant of few words. " * 8},
    {"role": "user", "content": "What is in /etc?"},
]
HEADER = 30
"""Tokens around a message and in front of a reply, at most."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two slots of 4,096 tokens; the template knows tools and strips old reasoning."""
    engine = Scripted(FakeEngine(slots=2, ctx=4096, tokenizer=FakeTokenizer(chat_template=TOOLS)))
    with Runtime(lambda: engine, Settings(memory_budget=64 << 20)) as runtime:
        with serving(runtime, model_id="fake") as served:
            yield served
        check(runtime)


def say(server: Server, *replies: str) -> None:
    assert server.runtime is not None
    assert isinstance(server.runtime.engine, Scripted)
    server.runtime.engine.say(*replies)


def ask(server: Server, messages: list[Any] = ASK, **options: Any) -> Any:
    return server.openai.chat.completions.create(**{"model": "fake", "max_tokens": 400, "messages": messages, **options})


def stream(server: Server, messages: list[Any] = ASK, **options: Any) -> dict[str, Any]:
    """A whole message, put together from its chunks as clients do it."""
    made: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None, "fragments": 0}
    for chunk in ask(server, messages, stream=True, **options):
        for choice in chunk.choices:
            delta = choice.delta
            made["content"] += delta.content or ""
            made["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                if call.id:
                    assert call.index == len(made["calls"])
                    assert call.type == "function"
                    made["calls"].append([call.id, call.function.name, ""])
                made["calls"][call.index][2] += call.function.arguments or ""
                made["fragments"] += 1
            made["finish"] = choice.finish_reason or made["finish"]
    return made


def test_a_call_is_a_call(server: Server) -> None:
    say(server, CALL)
    [choice] = ask(server, tools=[LS]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "ls")
    assert json.loads(call.function.arguments) == {"all": True, "path": "/etc"}


def test_arguments_are_json_where_the_model_breaks_lines_in_a_string(server: Server) -> None:
    """Clients read them with parsers that refuse a raw line break."""
    reply = CALL.replace("/etc", "/a\n\tb")
    say(server, reply, reply)
    [choice] = ask(server, tools=[LS]).choices
    made = stream(server, tools=[LS])
    assert (choice.finish_reason, made["finish"]) == ("tool_calls", "tool_calls")
    for text in (choice.message.tool_calls[0].function.arguments, made["calls"][0][2]):
        assert json.loads(text) == {"all": True, "path": "/a\n\tb"}


def test_calls_and_reasoning_are_streamed(server: Server) -> None:
    say(server, f"{THOUGHT}I look.\n\n{CALL}\n{OTHER}")
    made = stream(server, tools=[LS, CAT])
    assert made["reasoning"] == "They want to know what there is."
    assert made["content"] == "I look."
    assert [(name, json.loads(text)) for _, name, text in made["calls"]] == [("ls", {"all": True, "path": "/etc"}), ("cat", {})]
    assert made["finish"] == "tool_calls"
    assert made["fragments"] > 10, "arguments come as they are written"
    assert len({id for id, _, _ in made["calls"]}) == 2


def test_marks_are_text_where_nothing_can_be_called(server: Server) -> None:
    say(server, CALL, CALL)
    assert ask(server).choices[0].message.content == CALL
    [choice] = ask(server, tools=[LS], tool_choice="none").choices
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_reasoning_tokens_are_counted(server: Server) -> None:
    say(server, THOUGHT + "Much.")
    answer = ask(server)
    assert answer.choices[0].message.reasoning_content == "They want to know what there is."
    assert answer.choices[0].message.content == "Much."
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert 30 <= thought < answer.usage.completion_tokens


@pytest.mark.parametrize("spacing", [(", ", ": "), (",", ":")])
@pytest.mark.parametrize("kept", [True, False])
def test_the_next_turn_pays_for_the_result_only(server: Server, spacing: tuple[str, str], kept: bool) -> None:
    """Arguments in the client's own spelling, with the reasoning or without: nothing of the reply is computed again."""
    question = [ASK[0], {"role": "user", "content": f"What is in {spacing} {kept}?"}]
    say(server, THOUGHT + CALL, "A lot.")
    message = ask(server, question, tools=[LS]).choices[0].message
    call = message.tool_calls[0]
    spelled = json.dumps(json.loads(call.function.arguments), separators=spacing)
    back: dict[str, Any] = {
        "role": "assistant",
        "content": message.content,
        "tool_calls": [{"id": call.id, "type": "function", "function": {"name": "ls", "arguments": spelled}}],
    }
    if kept:
        back["reasoning_content"] = message.reasoning_content
    result = {"role": "tool", "tool_call_id": call.id, "content": "passwd hosts"}
    answer = ask(server, [*question, back, result], tools=[LS])
    assert answer.choices[0].message.content == "A lot."
    # Thirty characters are the marks around a result, eight tokens the end of the reply.
    assert answer.headstart["computed"] <= len("passwd hosts") + 2 * HEADER + 8


def test_a_required_call_is_made_and_valid(server: Server) -> None:
    """The fake engine draws what it likes, so only the grammar makes it call."""
    for choice in ("required", {"type": "function", "function": {"name": "ls"}}):
        made = ask(server, tools=[LS], tool_choice=choice, parallel_tool_calls=False, seed=3).choices[0]
        assert made.finish_reason == "tool_calls"
        [call] = made.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"path", "all"}
        assert isinstance(arguments["all"], bool)


OLD_CALL = {"name": "ls", "arguments": "{}"}
NEW_CALL = {"type": "function", "function": OLD_CALL}


@pytest.mark.parametrize(
    ("told", "same"),
    [
        ({"role": "assistant", "content": None, "refusal": "No."}, {"content": "No."}),
        ({"role": "assistant", "refusal": "No.", "content": "I"}, {"content": "I"}),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        ({"role": "assistant", "content": []}, {"content": ""}),
        ({"role": "assistant", "content": None}, {"content": ""}),
        ({"role": "assistant", "content": None, "reasoning_content": "Hm."}, {"content": "", "reasoning_content": "Hm."}),
        ({"role": "assistant", "content": None, "function_call": OLD_CALL}, {"content": "", "tool_calls": [NEW_CALL]}),
        (
            {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            {"role": "tool", "content": "[image left out: this server reads text only]"},
        ),
        (
            {"role": "tool", "content": [{"type": "file", "file": {"file_data": "data:"}}]},
            {"role": "tool", "content": "[file left out: this server reads text only]"},
        ),
        ({"role": "function", "name": "ls", "content": "etc"}, {"role": "tool", "name": "ls", "content": "etc"}),
        ({"role": "function", "name": "ls", "content": None}, {"role": "tool", "name": "ls", "content": ""}),
        ({"role": "tool", "tool_call_id": "1", "content": None}, {"role": "tool", "tool_call_id": "1", "content": ""}),
    ],
)
def test_whatever_a_history_holds_is_read(server: Server, told: dict[str, Any], same: dict[str, Any]) -> None:
    def text(message: dict[str, Any]) -> str:
        body = {"messages": [{"role": "user", "content": "?"}, message, {"role": "user", "content": "!"}]}
        answer = server.post("/apply-template", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["prompt"])

    assert text(told) == text({"role": "assistant", **same})


def allowed(*names: str, mode: str = "auto") -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_called_and_the_prompt_is_the_same(server: Server) -> None:
    options: dict[str, Any] = {"tools": [LS, CAT], "parallel_tool_calls": False, "seed": 3}
    free = ask(server, **options, max_tokens=1)
    made = ask(server, **options, tool_choice=allowed("ls", mode="required"))
    assert [call.function.name for call in made.choices[0].message.tool_calls] == ["ls"]
    assert made.usage.prompt_tokens == free.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="no tool 'rm'"):
        ask(server, **options, tool_choice=allowed("ls", "rm"))


class Answer(BaseModel):
    large: bool
    files: int


def test_a_format_is_kept(fake: Server) -> None:
    """Again nothing but the grammar makes it so; this template knows no reasoning that could come first."""
    made = fake.openai.chat.completions.parse(model="fake", messages=ASK, response_format=Answer, max_tokens=200, seed=5)
    assert isinstance(made.choices[0].message.parsed, Answer)
    made = ask(fake, response_format={"type": "json_object"}, seed=1, max_tokens=300)
    assert made.choices[0].finish_reason == "length" or isinstance(json.loads(made.choices[0].message.content), dict)
    made = ask(fake, extra_body={"guided_regex": "(yes|no)"})
    assert made.choices[0].message.content in ("yes", "no")
    made = ask(fake, extra_body={"grammar": 'root ::= "a" | "b"'})
    assert made.choices[0].message.content in ("a", "b")


CHOICE = ["yes", 'no, "never"', "vielleicht – ü\\ \n|(a)"]


@pytest.mark.parametrize(
    "options",
    [
        {"structured_outputs": {"choice": CHOICE}},
        {"guided_choice": CHOICE},
        {"structured_outputs": {"regex": "[0-9]{3}"}},
        {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
        {"guided_grammar": 'start: "a" | "b"'},
        {"structured_outputs": {"json": Answer.model_json_schema()}},
        {"structured_outputs": {"json": json.dumps(Answer.model_json_schema())}},
        {"guided_json": json.dumps(Answer.model_json_schema())},
        {"response_format": {"type": "json_object", "schema": Answer.model_json_schema()}},
        {"response_format": {"type": "json_schema", "schema": Answer.model_json_schema()}},
    ],
)
def test_formats_as_callers_of_vllm_and_llama_server_ask_for_them(fake: Server, options: dict[str, Any]) -> None:
    said = ask(fake, extra_body=options, max_tokens=200, seed=4).choices[0].message.content
    name, value = next(iter(options.items()))
    match next(iter(value)) if isinstance(value, dict) else name.removeprefix("guided_"):
        case "choice":
            assert said in CHOICE
        case "regex":
            assert re.fullmatch("[0-9]{3}", said)
        case "grammar":
            assert said in ("a", "b")
        case _:
            Answer.model_validate_json(said)


def test_a_text_is_continued_in_a_format(fake: Server) -> None:
    for options in ({"structured_outputs": {"choice": CHOICE}}, {"guided_choice": CHOICE}):
        body: dict[str, Any] = {"prompt": "say it: ", "max_tokens": 100, "seed": 3, **options}
        made = fake.post("/v1/completions", json=body)
        assert made.json()["choices"][0]["text"] in CHOICE
    made = fake.post("/v1/completions", json={"prompt": "a", "grammar": "x", "guided_regex": "y"})
    assert made.status_code == 400
    assert fake.post("/v1/completions", json={"prompt": "a", "structured_outputs": {"structural_tag": "x"}}).status_code == 400


NONSENSE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}


VAGUE: list[dict[str, Any]] = [
    {"guided_choice": []},
    {"guided_json": "{"},
    {"structured_outputs": {"choice": "yes"}},
    {"structured_outputs": {}},
    {"structured_outputs": {"structural_tag": "{}"}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"regex": "a"}, "grammar": "b"},
]


@pytest.mark.parametrize("options", [{"response_format": NONSENSE}, {"guided_regex": "("}, {"grammar": "root ::= ["}, *VAGUE])
def test_a_format_that_makes_no_sense_is_refused(server: Server, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(server, extra_body=options)


@pytest.mark.parametrize("param", ["grammar", "guided_regex", "structured_outputs.grammar"])
def test_the_field_of_a_format_that_makes_no_sense_is_named(server: Server, param: str) -> None:
    first, _, rest = param.partition(".")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, extra_body={first: {rest: "("} if rest else "("})
    assert caught.value.param == param


def test_a_schema_that_cannot_be_kept_is_named(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    culprit = {"type": "function", "function": {"name": "sort", "parameters": schema, "strict": True}}
    strict = {**LS, "function": {**LS["function"], "strict": True}}  # type: ignore[dict-item]
    for options, param, said in (
        ({"tools": [strict, culprit, CAT]}, "tools", "the schema of 'sort' cannot be followed: Unimplemented keys"),
        ({"tools": [strict, CAT], "response_format": form}, "response_format", "its schema cannot be followed: Unimplemented"),
    ):
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            ask(server, **options)
        assert caught.value.param == param
        assert "at 1(" not in str(caught.value)
    assert ask(server, tools=[strict, CAT], max_tokens=1).choices


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "email", "pattern": r"^(?!\.)[a-z.]+@[a-z]+$"},
        {"$ref": "#/components/x"},
        {"type": "any"},
        {"enum": []},
        {"properties": {"pattern": {"type": "string", "pattern": "(?=a)a"}}, "type": "object"},
    ],
    ids=["look-ahead", "reference", "type", "enum", "a-property-of-that-name"],
)
def test_a_tool_that_is_not_strict_is_followed_as_far_as_it_can_be(server: Server, schema: dict[str, Any]) -> None:
    """Such a tool was accepted, until a call was demanded or another tool was strict: then it was an error."""
    parameters = {"type": "object", "properties": {"to": schema}, "required": ["to"]}
    mail = {"type": "function", "function": {"name": "mail", "parameters": parameters}}
    strict = {**LS, "function": {**LS["function"], "strict": True}}  # type: ignore[dict-item]
    for options in ({"tools": [mail, strict]}, {"tools": [mail], "tool_choice": "required"}):
        assert ask(server, **options, max_tokens=1).choices
    with pytest.raises(openai.BadRequestError, match="the schema of 'mail' cannot be followed"):
        ask(server, tools=[{**mail, "function": {**mail["function"], "strict": True}}])  # type: ignore[dict-item]


def test_a_reply_that_is_begun_is_continued(server: Server) -> None:
    begun = [*ASK, {"role": "assistant", "content": "In /etc there"}]
    say(server, " is much.", "Yes.")
    made = ask(server, begun, extra_body={"continue_final_message": True})
    assert made.choices[0].message.content == " is much."
    back = [*ASK, {"role": "assistant", "content": "In /etc there is much."}, {"role": "user", "content": "Sure?"}]
    assert ask(server, back).headstart["computed"] <= len("Sure?") + 2 * HEADER + 8


def test_a_reply_with_a_call_settles(server: Server) -> None:
    """Then the tool's result is all that is computed, whatever the model wrote around its call."""
    assert server.runtime is not None
    scheduler = server.runtime.scheduler
    say(server, f"{THOUGHT}{CALL}\n\n", "Much.")
    question = [ASK[0], {"role": "user", "content": "And where is the rest of all that? " * 4}]
    message = ask(server, question, tools=[LS]).choices[0].message
    wait_until(lambda: scheduler.idle)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "passwd hosts"}
    answer = ask(server, [*question, message.model_dump(exclude_none=True), result], tools=[LS])
    assert answer.headstart["computed"] <= len("passwd hosts") + 2 * HEADER + 8  # the block size of the fake engine is 8


@pytest.mark.parametrize("arguments", ['{"path": nope}\n</tool_call>', '{"path": "/e'])
def test_a_broken_call_ends_as_the_reply_does(server: Server, arguments: str) -> None:
    reply = '<tool_call>\n{"name": "ls", "arguments": ' + arguments
    say(server, reply, reply)
    choice = ask(server, tools=[LS]).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments[:9]) == ("stop", arguments[:9])
    assert stream(server, tools=[LS])["finish"] == "stop"


def test_the_markup_of_a_call_is_never_text_where_a_reply_is_cut(server: Server) -> None:
    for limit in range(len("<tool_call>"), len(CALL), 5):
        say(server, CALL)
        message = ask(server, tools=[LS], max_tokens=limit).choices[0].message
        assert not message.content
