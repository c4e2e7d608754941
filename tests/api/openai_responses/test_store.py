"""What the store of responses keeps, and items as messages."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from headstart.api.openai_responses.items import as_arguments, as_text, messages_of, seal, tools_of, unseal
from headstart.api.openai_responses.schema import ResponsesTool
from headstart.api.openai_responses.store import (
    PREFIX,
    ResponseLine,
    Responses,
    StoredResponse,
    UnknownResponse,
    identified,
    item_id,
)

HEX = "0123456789abcdef" * 2


def stored(number: int, size: int = 1) -> StoredResponse:
    id = f"{PREFIX}{number:032x}"
    own = identified([{"type": "message", "role": "user", "content": f"question {number}"}], id)
    output = {"type": "message", "id": item_id("message", id, "0"), "role": "assistant", "content": []}
    return StoredResponse({"id": id, "output": [output]}, size, own, ResponseLine((*own, output), 0))


def kept(store: Responses, numbers: range) -> list[int]:
    found = []
    for number in numbers:
        try:
            store.get("", stored(number).response["id"])
        except UnknownResponse:
            continue
        found.append(number)
    return found


def test_the_least_recently_used_goes_first() -> None:
    store = Responses(limit=3)
    for number in range(3):
        store.put("", stored(number))
    store.get("", stored(0).response["id"])
    store.put("", stored(3))
    assert kept(store, range(4)) == [0, 2, 3]


def test_characters_are_bounded_too() -> None:
    store = Responses(size=100)
    for number in range(4):
        store.put("", stored(number, 40))
    assert kept(store, range(4)) == [2, 3]
    store.put("", stored(9, 101))
    assert kept(store, range(10)) == [2, 3], "what alone is too large puts out no others"
    for number in range(2):
        store.put("", stored(number, 50))
    store.drop("", stored(0).response["id"])
    store.put("", stored(2, 50))
    assert kept(store, range(3)) == [1, 2]


def gone_on(length: int, size: int) -> list[StoredResponse]:
    """A line of responses, each of which adds `size` characters and has `size` of its own."""
    line: list[StoredResponse] = []
    for number in range(100, 100 + length):
        bare = stored(number, size)
        line.append(replace(bare, line=ResponseLine(bare.line.items, size, line[-1].line if line else None)))
    return line


def test_a_line_of_responses_begins_with_what_it_goes_on_from() -> None:
    one = StoredResponse.of(stored(1).response, stored(1).input, None, 7.0)
    two = StoredResponse.of(stored(2).response, stored(2).input, one, 9.0)
    assert two.context == (*one.context, *stored(2).context)
    assert two.line.total == 2 * one.line.total > 0


def test_what_a_line_shares_is_counted_once() -> None:
    store = Responses(size=1000)
    store.put("", stored(1, 10))
    for one in gone_on(40, 10):
        store.put("", one)
    assert len(kept(store, range(1, 2))) == 1, "a long line puts out nobody"
    assert len(kept(store, range(100, 140))) == 40


def test_what_a_line_still_needs_counts_when_its_beginning_is_gone() -> None:
    store = Responses(size=100)
    line = gone_on(4, 10)
    for one in line:
        store.put("", one)
    for one in line[:3]:
        store.drop("", one.response["id"])
    assert [part.users for part in line[3].line.parts()] == [1, 1, 1, 1]
    store.put("", stored(1, 51))
    assert kept(store, range(1, 104)) == [1], "it holds 50 with what it goes on from"
    assert [part.users for part in line[3].line.parts()] == [0, 0, 0, 0]
    store.put("", stored(2, 49))
    assert kept(store, range(1, 104)) == [1, 2], "all of it is free again"


def test_lines_that_part_share_their_beginning() -> None:
    store = Responses(size=1000)
    root = gone_on(1, 500)[0]
    for number in range(10):
        bare = stored(number, 10)
        store.put("", replace(bare, line=ResponseLine(bare.line.items, 10, root.line)))
    assert kept(store, range(10)) == list(range(10))


def test_a_line_that_is_too_long_puts_out_nobody() -> None:
    store = Responses(size=200)
    store.put("", stored(1, 10))
    for one in gone_on(30, 10):
        store.put("", one)
    assert kept(store, range(100, 130)), "it goes on as long as it fits"
    store = Responses(size=200)
    store.put("", stored(1, 10))
    store.put("", gone_on(30, 10)[-1])
    assert kept(store, range(130)) == [1]


def test_items_are_found_by_their_ids_in_their_own_salt_only() -> None:
    store = Responses()
    entry = stored(5)
    store.put("a", entry)
    for item in entry.context:
        assert store.item("a", item["id"]) == item
        with pytest.raises(UnknownResponse):
            store.item("b", item["id"])
    for id in ("", "msg", "msg_", entry.context[0]["id"] + "x", "msg_" + HEX + "0"):
        with pytest.raises(UnknownResponse):
            store.item("a", id)


def test_that_a_response_was_met_is_all_that_is_kept_of_some() -> None:
    store = Responses()
    store.meet("a", "resp_1")
    assert store.met("a", "resp_1")
    assert not store.met("b", "resp_1")
    assert not store.met("a", "resp_2")
    with pytest.raises(UnknownResponse):
        store.get("a", "resp_1")


@pytest.mark.parametrize("text", ["", "I think.", "é\n\x00😀", "x" * 10_000])
def test_what_is_sealed_is_unsealed(text: str) -> None:
    assert unseal(seal(text)) == text


def test_halves_of_characters_are_not_sealed() -> None:
    """Fault: an answer that quoted one could not be sent."""
    assert unseal(seal("a\ud83db")) == "a?b"
    assert unseal(base64.b64encode(b"headstart.reasoning.1\nab\xed\xa0\x80cd").decode()) is None


@pytest.mark.parametrize("sealed", ["", "gAAAAAB", "aGVsbG8=", "not base64", "aGVhZHN0YXJ0"])
def test_foreign_seals_are_left_alone(sealed: str) -> None:
    assert unseal(sealed) is None


def test_the_text_of_a_custom_tool_survives_being_an_argument() -> None:
    for text in ("", "*** Begin\n+é\"'", '{"input": 1}'):
        assert as_text(as_arguments(text)) == text
    assert as_text("cut off {") == "cut off {"
    assert as_text('["input"]') == '["input"]'


# ── items → messages ─────────────────────────────────────────────────────────────────────────────────────────────────

ASK = {"type": "message", "role": "user", "content": "?"}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"call_{number}", "name": "f", "arguments": "{}"}


def shape(items: list[dict[str, Any]]) -> list[str]:
    """Each message in short: role, reasoning, text, calls."""
    return [
        ":".join(
            [
                message["role"],
                message.get("reasoning_content", ""),
                message["content"],
                ",".join(one["id"] for one in message.get("tool_calls", ())),
            ]
        )
        for message in messages_of(items)
    ]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([thought("t"), said("a"), call(1), call(2)], ["assistant:t:a:call_1,call_2"]),
        ([thought("t"), call(1)], ["assistant:t::call_1"]),
        ([said("a"), call(1), said("b")], ["assistant::ab:call_1"]),
        ([call(1), thought("t"), call(2)], ["assistant:t::call_1,call_2"]),
        ([thought("t"), thought("u"), said("a")], ["assistant:tu:a:"]),
        ([said("a"), said("b")], ["assistant::a:", "assistant::b:"]),
        ([said("a"), thought("t"), said("b")], ["assistant::a:", "assistant:t:b:"]),
        ([said("a"), ASK, said("b")], ["assistant::a:", "user::?:", "assistant::b:"]),
        (
            [call(1), {"type": "function_call_output", "call_id": "call_1", "output": "r"}, thought("t"), said("b")],
            ["assistant:::call_1", "tool::r:", "assistant:t:b:"],
        ),
        ([said("a"), {"type": "web_search_call", "id": "ws_1"}, call(1)], ["assistant::a:call_1"]),
    ],
)
def test_the_items_of_a_reply_are_one_message(items: list[dict[str, Any]], expected: list[str]) -> None:
    assert shape(items) == expected


def test_breakpoints_stay_with_their_parts() -> None:
    part = {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
    (message,) = messages_of([{"type": "message", "role": "user", "content": [part]}])
    assert message["content"] == [{"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}]
    output = {**part, "type": "output_text"}
    (message,) = messages_of([{"type": "message", "role": "assistant", "content": [output]}])
    assert message["content"] == [{"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}]


def test_a_namespace_parts_tools_of_one_name() -> None:
    one = ResponsesTool(type="function", name="f")
    space = ResponsesTool(type="namespace", name="n", tools=[one])
    assert set(tools_of([one, space]).named) == {"f", "n.f"}


def test_a_custom_tools_grammar_is_told_to_the_model() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}
    tool = ResponsesTool.model_validate({"type": "custom", "name": "patch", "description": "Patches.", "format": form})
    (offered,) = tools_of([tool]).offered
    assert offered["function"]["description"] == "Patches.\n\nThe input follows this grammar:\nstart: /x+/"
    assert offered["function"]["parameters"]["required"] == ["input"]
