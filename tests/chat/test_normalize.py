"""Each kind of noise that clients put into a conversation is undone, can be left alone, and nothing else changes."""

from __future__ import annotations

import copy
import json
from datetime import datetime, timedelta
from typing import Any

import pytest

from headstart.chat.messages import ChatBody, conversation_of
from headstart.chat.normalize import RULES, Ground, normalise
from headstart.chat.reply_memory import ConversationDigest, ReplyMemory
from headstart.interfaces.conversation import Conversation
from headstart.output.canonical_json import canonical_tool
from headstart.prompt.chat_template import Template
from headstart.templates import of_model
from templates import TOOLS

MARK = {"cache_control": {"type": "ephemeral"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.329.{}; cc_entrypoint=cli"
STRICT = """
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{%- endif %}
{%- if not loop.first and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('roles alternate') }}{%- endif %}
{{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""
CHATML = of_model(None).source
DATED = "{{ strftime_now('%d %b %Y') }}" + CHATML


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def developer(content: str) -> dict[str, Any]:
    return {"role": "developer", "content": content}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def call(arguments: Any, name: str = "read") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def tool(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "read", "description": "reads", "parameters": parameters}, **more}


PATHS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
    "required": ["path", "lines"],
}
TURNED = {
    "required": ["path", "lines"],
    "properties": {"lines": {"type": "integer"}, "path": {"type": "string"}},
    "type": "object",
}


class Client:
    """Says things to one template."""

    def __init__(self, template: str = TOOLS, keep: tuple[str, ...] = ()) -> None:
        self.now = datetime(2026, 11, 21, 23, 59)
        self.reply_memory = ReplyMemory(now=lambda: self.now)
        self.template = Template(template, {})
        self.keep = keep

    def conversation(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, salt: str = ""
    ) -> Conversation:
        form = ChatBody.model_validate({"messages": messages, "tools": tools})
        return normalise(conversation_of(form, salt), Ground(self.template, self.reply_memory), self.keep)

    def text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, salt: str = "") -> str:
        said = self.conversation(messages, tools, salt)
        return self.template.render(said.messages, tools=said.tools, variables=said.template_kwargs)


SAME: list[tuple[str, str, tuple[Any, Any], tuple[Any, Any]]] = [
    (
        "billing",
        TOOLS,
        ([system([part(BILLING.format("4ba")), part("be brief")]), user("go")], None),
        ([system([part(BILLING.format("3dd")), part("be brief")]), user("go")], None),
    ),
    ("parts", TOOLS, ([user("go on")], None), ([user([part("go on")])], None)),
    ("hints", TOOLS, ([user("go on")], None), ([user([part("go on", **MARK)], **MARK)], None)),
    ("hints", TOOLS, ([user("go")], [tool(PATHS)]), ([user("go")], [tool(PATHS, **MARK)])),
    (
        "roles",
        TOOLS,
        ([system("be brief"), user("go")], None),
        ([{"role": "developer", "content": "be brief"}, user("go")], None),
    ),
    (
        "arguments",
        TOOLS,
        ([user("go"), call('{"path": "a", "lines": 3}')], [tool(PATHS)]),
        ([user("go"), call('{"lines":3,"path":"a"}')], [tool(PATHS)]),
    ),
    (
        "arguments",
        TOOLS,
        ([user("go"), call({"path": "a", "lines": 3})], [tool(PATHS)]),
        ([user("go"), call('{ "path":"a",\n"lines":3 }')], [tool(PATHS)]),
    ),
    ("schemas", TOOLS, ([user("go")], [tool(PATHS)]), ([user("go")], [tool(TURNED)])),
]


@pytest.mark.parametrize(("rule", "template", "one", "other"), SAME)
def test_two_ways_to_say_the_same_render_to_the_same(rule: str, template: str, one: Any, other: Any) -> None:
    before = copy.deepcopy((one, other))
    assert Client(template).text(*one) == Client(template).text(*other)
    assert (one, other) == before


@pytest.mark.parametrize(("rule", "template", "one", "other"), [row for row in SAME if row[0] not in ("parts", "hints")])
def test_a_rule_that_is_left_out_does_nothing(rule: str, template: str, one: Any, other: Any) -> None:
    assert Client(template, keep=(rule,)).text(*one) != Client(template, keep=(rule,)).text(*other)


def test_every_rule_is_shown_here_and_its_name_is_its_own() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert set(names) == {row[0] for row in SAME} | {"reasoning", "clock"}


def test_the_billing_line_goes_and_nothing_else() -> None:
    client = Client()
    lines = BILLING.format("4ba") + "\n\nbe brief"
    assert client.text([system(lines), user("go")]) == client.text([system("be brief"), user("go")])
    later = [system("be brief"), user(BILLING.format("4ba"))]
    assert BILLING.format("4ba") in client.text(later)  # only the first block of the system prompt is noise
    assert client.conversation([system(BILLING.format("4ba")), user("go")]).messages == ({"role": "user", "content": "go"},)


def test_a_part_that_is_marked_becomes_a_breakpoint() -> None:
    said = Client().conversation(
        [system([part("abc", **MARK), part("defg")]), user([part("x"), part("yz", **MARK)]), user("q", **MARK)]
    )
    assert said.breakpoints == ((0, 3), (1, 4), (2, 1))
    assert [message["content"] for message in said.messages] == ["abc\ndefg", "x\nyz", "q"]


def test_the_last_marks_are_kept() -> None:
    """Each is found by tokenising what is before it: without a bound that is the square of the prompt."""
    said = Client().conversation([user([part("x", **MARK)] * 90), user([part("y", **MARK)] * 2)])
    assert said.breakpoints == ((0, 177), (0, 179), (1, 1), (1, 3))


def test_marks_of_messages_that_become_one_stay_where_they_were() -> None:
    said = Client(STRICT).conversation([user("one", **MARK), user([part("two"), part("three")], **MARK), user("four")])
    assert [message["content"] for message in said.messages] == ["one\n\ntwo\nthree\n\nfour"]
    ends = [said.messages[0]["content"][:at] for _, at in said.breakpoints]
    assert [end.rstrip() for end in ends] == ["one", "one\n\ntwo\nthree"]


def test_system_messages_that_a_template_refuses_become_a_users() -> None:
    client = Client(STRICT)
    first = [system("be brief"), user("go"), system("it is late")]
    text = client.text(first)
    assert text == "<system>be brief<user>go\n\nit is late"
    longer = [*first, {"role": "assistant", "content": "yes"}, system("later still"), user("and?")]
    assert client.text(longer) == text + "<assistant>yes<user>later still\n\nand?"
    assert client.text([system("a"), system("b"), user("c")]) == "<system>a\n\nb<user>c"


def test_system_messages_stay_where_a_template_takes_them() -> None:
    messages = [system("be brief"), user("go"), system("it is late"), user("and?")]
    found = Client(CHATML).conversation(messages).messages
    assert [message["role"] for message in found] == ["system", "user", "system", "user"]


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    said = Client().conversation([user("go"), call('{"path": ')], [tool(PATHS)])
    assert said.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"path": '


@pytest.mark.parametrize("reply", [call('{"path": "a", "lines": 3}'), {"role": "assistant", "content": "so be it"}])
def test_a_reply_that_comes_back_without_its_reasoning_gets_it_back(reply: dict[str, Any]) -> None:
    client = Client()
    whole = {**reply, "reasoning_content": "let me see"}
    client.reply_memory.reply("", [user("go")], whole)
    [_, said] = client.conversation([user("go"), reply], [tool(PATHS)]).messages
    assert said["reasoning_content"] == "let me see"
    assert client.text([user("go"), reply], [tool(PATHS)]) == client.text([user("go"), whole], [tool(PATHS)])
    for end in ("see", "see\n", "\n", whole["reasoning_content"]):
        assert client.text([user("go"), {**reply, "reasoning_content": end}], [tool(PATHS)]) == client.text(
            [user("go"), whole], [tool(PATHS)]
        )
    for other in ("let me", "I see"):
        [_, said] = client.conversation([user("go"), {**reply, "reasoning_content": other}], [tool(PATHS)]).messages
        assert said["reasoning_content"] == other
    edited = {**reply, "content": "not so"}
    [_, said] = client.conversation([user("go"), edited], [tool(PATHS)]).messages
    assert "reasoning_content" not in said
    [_, said] = client.conversation([user("go"), reply], [tool(PATHS)], salt="another").messages
    assert "reasoning_content" not in said


def test_reasoning_belongs_to_its_place_in_its_conversation() -> None:
    """The same words twice, and in another conversation, are other replies."""
    client = Client()
    yes = {"role": "assistant", "content": "yes"}
    first = [system("a"), user("sure?")]
    second = [*first, yes, user("sure?")]
    client.reply_memory.reply("", first, {**yes, "reasoning_content": "one"})
    client.reply_memory.reply("", second, {**yes, "reasoning_content": "two"})
    said = client.conversation([*second, yes]).messages
    assert [message.get("reasoning_content") for message in said] == [None, None, "one", None, "two"]
    assert "reasoning_content" not in client.conversation([system("b"), user("sure?"), yes]).messages[2]


def test_replies_with_one_id_are_told_apart_by_their_calls() -> None:
    """Ids that follow from the place of a reply are the same in all replies to one question."""
    client, replies = Client(), [call('{"path": "a", "lines": 20.0}'), call('{"path": "b", "lines": 3}')]
    for reply, reasoning in zip(replies, ("a first", "b first"), strict=True):
        client.reply_memory.reply("", [user("go")], {**reply, "reasoning_content": reasoning})
    sent_back = [call({"lines": 20, "path": "a"}), call({"lines": 3, "path": "b"}), call({"lines": 3, "path": "c"})]
    found = [client.conversation([user("go"), reply], [tool(PATHS)]).messages[1] for reply in sent_back]
    assert [message.get("reasoning_content") for message in found] == ["a first", "b first", None]


def test_a_conversation_keeps_the_date_on_which_it_began() -> None:
    client = Client(DATED)
    first = client.text([system("be brief"), user("go")])
    client.now += timedelta(minutes=2)
    assert client.text([system("be brief"), user("go"), call("{}"), user("and?")]).startswith(first)
    assert "21 Nov 2026" in first
    assert "22 Nov 2026" in client.text([system("be brief"), user("something else")])
    assert "22 Nov 2026" in client.text([system("be brief"), user("go")]), "another conversation with this beginning"
    other = Client(DATED, keep=("clock",))
    assert Client(TOOLS).conversation([user("go")]).template_kwargs == {} == other.conversation([user("go")]).template_kwargs


def test_recall_is_bounded() -> None:
    reply_memory = ReplyMemory(limit=8, size=100)
    for number in range(50):
        reply_memory.reply("", [user(str(number))], {"role": "assistant", "content": "ok", "reasoning_content": "hm" * 5})

    def line(number: int) -> ConversationDigest:
        made = ConversationDigest("")
        made.add(user(str(number)))
        return made

    kept = [number for number in range(50) if reply_memory.reasoning(line(number), {"role": "assistant", "content": "ok"})]
    assert kept == list(range(42, 50))


def test_tools_are_made_canonical_once_for_each_tenant() -> None:
    reply_memory = ReplyMemory()
    first = reply_memory.tools("a", [tool(PATHS)])
    assert reply_memory.tools("a", [tool(PATHS)]) is first == (canonical_tool(tool(TURNED)),)
    assert reply_memory.tools("b", [tool(PATHS)]) is not first


@pytest.mark.parametrize("others", [[1, 1.0], [1, True], [0, False], [1.0, True]])
def test_tools_whose_values_only_compare_equal_are_not_mixed_up(others: list[Any]) -> None:
    reply_memory = ReplyMemory()
    said = [reply_memory.tools("", [tool({"type": "object", "default": value})]) for value in others]
    assert [json.dumps(tools[0]["function"]["parameters"]["default"]) for tools in said] == [json.dumps(one) for one in others]


def test_remembered_tools_are_bounded() -> None:
    reply_memory = ReplyMemory(limit=4, size=4000)
    made = [reply_memory.tools("", [tool({"enum": [number]})]) for number in range(6)]
    kept = [reply_memory.tools("", [tool({"enum": [number]})]) is tools for number, tools in reversed([*enumerate(made)])]
    assert kept == [True] * 4 + [False] * 2
    for large in ("large" * 1000, [{}] * 100):  # of which the second is short as it is sent
        tools = [tool({"default": large})]
        assert reply_memory.tools("", tools) is not reply_memory.tools("", tools)


def test_tools_that_are_no_json_are_not_remembered() -> None:
    reply_memory, odd = ReplyMemory(), [tool({"default": datetime(2026, 11, 22)})]
    first = reply_memory.tools("", odd)
    assert first is not reply_memory.tools("", odd) == first == (canonical_tool(odd[0]),)
