"""Bodies of /v1/messages: what they say, whatever form they say it in, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.api.anthropic.conversation import conversation_of
from headstart.api.anthropic.schema import CountTokensRequest, MessagesRequest
from headstart.api.body import parse
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Conversation, Format, ToolChoice

EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
LS = {"name": "ls", "description": "Lists a folder.", "input_schema": {"type": "object", "properties": {}}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": "/"}}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def read(messages: list[Any], **more: Any) -> Conversation:
    body = {"max_tokens": 1, "messages": messages, **more}
    return conversation_of(parse(MessagesRequest, json.dumps(body).encode()))


def said(conversation: Conversation) -> list[tuple[str, str]]:
    """Role and text of each message."""
    found = []
    for message in conversation.messages:
        content = message["content"]
        joined = content if isinstance(content, str) else "|".join(part["text"] for part in content)
        found.append((message["role"], joined))
    return found


def test_system_stands_where_it_was_said() -> None:
    hi = {"role": "user", "content": "hi"}
    assert said(read([hi], system="be brief")) == [("system", "be brief"), ("user", "hi")]
    assert said(read([hi], system=[text("be"), text("brief")])) == [("system", "be|brief"), ("user", "hi")]
    late = [hi, {"role": "system", "content": [text("it is late")]}, hi]
    assert said(read(late)) == [("user", "hi"), ("system", "it is late"), ("user", "hi")]
    assert said(read([hi], system="")) == [("user", "hi")]


def test_neighbours_of_one_role_are_one_turn() -> None:
    one, three = {"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}
    conversation = read([one, user(text("b")), three, user(text("d"))])
    assert said(conversation) == [("user", "a|b"), ("assistant", "c"), ("user", "d")]


def test_results_come_before_the_text_beside_them() -> None:
    results = user(
        text("go on"),
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "etc"},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("no such"), text("folder")], "is_error": True},
        {"type": "tool_result", "tool_use_id": "toolu_3"},
    )
    conversation = read([user(text("?")), {"role": "assistant", "content": [USE]}, results])
    assert said(conversation)[2:] == [("tool", "etc"), ("tool", "Error:|no such|folder"), ("tool", ""), ("user", "go on")]
    assert [message.get("tool_call_id") for message in conversation.messages[2:]] == ["toolu_1", "toolu_2", "toolu_3", None]


def test_a_reply_has_its_reasoning_its_text_and_its_calls() -> None:
    blocks = [
        {"type": "thinking", "thinking": "look first", "signature": "anything"},
        {"type": "redacted_thinking", "data": "???"},
        text("I "),
        text("look."),
        USE,
    ]
    conversation = read([user(text("?")), {"role": "assistant", "content": blocks}, user(text("!"))])
    assert conversation.messages[1] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "look first",
        "tool_calls": [{"id": "toolu_1", "type": "function", "function": {"name": "ls", "arguments": {"path": "/"}}}],
    }
    assert not conversation.continues


@pytest.mark.parametrize(("given", "arguments"), [([1], "[1]"), ("ls", '"ls"'), (None, "null"), ({}, {})])
def test_a_call_may_have_any_name_and_any_input(given: Any, arguments: Any) -> None:
    call = {**USE, "name": "list files!", "input": given}
    conversation = read([user(text("?")), {"role": "assistant", "content": [call]}, user(text("!"))])
    assert conversation.messages[1]["tool_calls"][0]["function"] == {"name": "list files!", "arguments": arguments}


def test_a_last_reply_is_a_beginning() -> None:
    assert read([user(text("?")), {"role": "assistant", "content": "The"}]).continues


def test_texts_of_other_kinds_are_written_as_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "All of it."}
    inner = {"type": "content", "content": [text("One."), text("Two.")]}
    found = {"type": "search_result", "source": "/a", "title": "A", "content": [text("Found.")]}
    documents = {"type": "document", "source": source, "title": "T"}, {"type": "document", "source": inner}
    conversation = read([user(*documents, found)])
    assert said(conversation)[0][1].split("|") == [
        "<document>\n<title>\nT\n</title>\n<document_content>\nAll of it.\n</document_content>\n</document>",
        "<document>\n<document_content>\nOne.\nTwo.\n</document_content>\n</document>",
        "<search_result>\n<title>\nA\n</title>\n<source>\n/a\n</source>\n<content>\nFound.\n</content>\n</search_result>",
    ]


def test_marks_stay_where_they_were_put() -> None:
    conversation = read(
        [
            user(text("a", cache_control=EPHEMERAL), text("b")),
            {"role": "assistant", "content": [text("c", cache_control=EPHEMERAL), USE]},
            user({"type": "tool_result", "tool_use_id": "toolu_1", "content": "d", "cache_control": HOUR}),
        ],
        system=[text("s", cache_control=HOUR)],
        tools=[{**LS, "cache_control": EPHEMERAL}],
    )
    system, asked, reply, result = conversation.messages
    assert system["content"][0]["cache_control"] == HOUR
    assert ["cache_control" in part for part in asked["content"]] == [True, False]
    assert reply["cache_control"] == EPHEMERAL
    assert result["cache_control"] == HOUR
    assert conversation.tools[0]["cache_control"] == EPHEMERAL
    assert read([user(text("a"))], cache_control=EPHEMERAL).messages[-1]["cache_control"] == EPHEMERAL


def test_marks_for_an_hour_are_counted() -> None:
    body = {
        "messages": [
            user({"type": "tool_result", "tool_use_id": "t", "content": [text("x", cache_control=EPHEMERAL)]}),
            user(text("x", cache_control=HOUR)),
        ],
        "system": [text("s", cache_control=HOUR)],
        "tools": [{**LS, "cache_control": HOUR}],
        "cache_control": EPHEMERAL,
    }
    assert parse(CountTokensRequest, json.dumps(body).encode()).hours == 3


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", None, False)),
        ({"type": "tool", "name": "ls"}, ToolChoice("required", "ls")),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_what_may_be_called(given: Any, choice: ToolChoice) -> None:
    conversation = read(HI, tools=[{**LS, "strict": True}], **({"tool_choice": given} if given else {}))
    assert conversation.choice == choice
    function = {"name": "ls", "description": "Lists a folder.", "parameters": LS["input_schema"], "strict": True}
    assert conversation.tools == ({"type": "function", "function": function},)


def test_tools_that_only_the_vendor_runs_are_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    known = {"type": "custom", **LS}
    assert [tool["function"]["name"] for tool in read(HI, tools=[search, known]).tools] == ["ls"]
    bash = {"type": "bash_20250124", "name": "bash", "input_schema": {"type": "object"}}
    assert [tool["function"]["name"] for tool in read(HI, tools=[bash]).tools] == ["bash"]


@pytest.mark.parametrize(
    ("given", "extra"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"effort": "utmost"}}, {}),
        ({"thinking": {"type": "wild", "display": "loud", "budget_tokens": 0}}, {}),
        ({"cache_control": {"type": "eternal", "ttl": "2h"}}, {}),
    ],
)
def test_how_much_is_thought(given: dict[str, Any], extra: dict[str, Any]) -> None:
    assert read(HI, **given).template_kwargs == extra


def test_what_a_reply_must_be() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for given, param in (
        ({"output_config": {"format": form}}, "output_config.format"),
        ({"output_format": form}, "output_format"),
    ):
        assert read(HI, **given).format == Format("json_schema", '{"type": "object"}', strict=True, param=param)
    assert read(HI, output_config={"effort": "low"}).format is None


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}


def test_a_result_with_an_image_says_that_it_is_left_out() -> None:
    shot = {"type": "tool_result", "tool_use_id": "t", "content": [text("Saved."), {**IMAGE, "cache_control": EPHEMERAL}]}
    result = read([user(shot)]).messages[0]
    assert result["content"] == [
        text("Saved."),
        text("[image left out: this server reads text only]", cache_control=EPHEMERAL),
    ]


def left_out(kind: str) -> str:
    return f"[{kind} left out: this server reads text only]"


@pytest.mark.parametrize(
    ("block", "written"),
    [
        (PDF, left_out("document")),
        ({"type": "document", "source": {"type": "url", "url": "http://x/a.pdf"}, "title": "a"}, left_out("document")),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, left_out("document")),
        ({"type": "tool_reference", "tool_name": "ls"}, "ls"),
        ({"type": "video"}, left_out("video")),
        (USE, left_out("tool_use")),
        (
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Hi."}},
            "<document>\n<document_content>\nHi.\n</document_content>\n</document>",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [text("Hi."), IMAGE]}},
            f"<document>\n<document_content>\nHi.\n{left_out('image')}\n</document_content>\n</document>",
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_whatever_a_tool_returns_is_read(block: dict[str, Any], written: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("Done."), {**block, "cache_control": EPHEMERAL}]}
    content = read([user(result)]).messages[0]["content"]
    assert content == [text("Done."), text(written, cache_control=EPHEMERAL)]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0]", "'user'"),
    ({"messages": [user(IMAGE)]}, "messages[0].content[0]", "'image': this server reads text only"),
    ({"messages": [user(PDF)]}, "messages[0].content[0].source", "'base64': this server reads text only"),
    (
        {"messages": [user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": 5}]})]},
        "messages[0].content[0].content[0]",
        "'text'",
    ),
    ({"messages": [user(USE)]}, "messages[0].content[0]", "'tool_result'"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text", "required"),
    ({"messages": [{"role": "assistant", "content": [{**USE, "id": ""}]}]}, "messages[0].content[0].id", "at least 1"),
    (
        {"messages": [user(text("a", cache_control={"type": "ephemeral", "ttl": 5}))]},
        "messages[0].content[0].cache_control.ttl",
        "must be",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": 5}]}]},
        "messages[0].content[0].signature",
        "string",
    ),
    ({"max_tokens": None}, "max_tokens", "integer"),
    ({"max_tokens": -1}, "max_tokens", "greater"),
    ({"temperature": 1.5}, "temperature", "less"),
    ({"top_p": -0.1}, "top_p", "greater"),
    ({"top_k": 0.5}, "top_k", "integer"),
    ({"stop_sequences": "x"}, "stop_sequences", "list"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"cache_control": {"type": "ephemeral", "ttl": 1}}, "cache_control.ttl", "string"),
    ({"tools": [{"name": "ls"}]}, "tools[0]", "input_schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]", "'bash_20250124' is not known here"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "does not run 'web_search_20250305'"),
    ({"thinking": {"type": 5}}, "thinking.type", "string"),
]


@pytest.mark.parametrize(("change", "param", "says"), REFUSED, ids=[json.dumps(row[0])[:60] for row in REFUSED])
def test_what_cannot_be_served_is_refused(change: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(MessagesRequest, json.dumps({"max_tokens": 1, "messages": HI, **change}).encode())
    assert caught.value.param == param
    assert says in caught.value.message
