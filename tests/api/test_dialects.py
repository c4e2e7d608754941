"""Which dialect a body is in, without its path."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.api.dialects import conversation_of
from headstart.api.openai_responses.store import Responses
from headstart.interfaces.conversation import Conversation

HI = {"role": "user", "content": "hi"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "ls", "arguments": {}}}]}


def read(body: dict[str, Any]) -> Conversation:
    return conversation_of(body, lambda user, salt: salt or "", Responses())


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [HI], "options": {"temperature": 0}},
        {"messages": [HI], "format": "json"},
        {"messages": [HI], "think": False},
        {"messages": [HI, {"role": "assistant", "content": "yes", "thinking": "Hm."}, HI]},
        {"messages": [HI, CALLED, {"role": "tool", "tool_name": "ls", "content": "none"}]},
        {"prompt": "hi", "system": "Be brief."},
        {"prompt": "hi", "options": {}},
    ],
)
def test_ollamas_bodies_are_known_by_their_fields(body: dict[str, Any]) -> None:
    found = read({**body, "cache_salt": "apart"})
    assert found.messages[-1]["content"] in ("hi", "none")
    assert found.salt == "apart"
    if "format" in body:
        assert found.format is not None
    if "thinking" in str(body):
        assert found.messages[1]["reasoning_content"] == "Hm."
    if found.messages[-1]["role"] == "tool":
        assert found.messages[-1]["tool_call_id"] == found.messages[1]["tool_calls"][0]["id"]


def test_a_chat_is_the_same_conversation_in_both_dialects() -> None:
    assert read({"messages": [HI], "options": {}}) == read({"messages": [HI]})
