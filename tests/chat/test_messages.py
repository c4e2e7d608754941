"""Messages as clients send them, with fields that say the same by two names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.chat.messages import ChatBody, conversation_of
from headstart.interfaces.conversation import Message


def read(**message: Any) -> Message:
    body = json.dumps({"messages": [{"role": "assistant", "content": "A", **message}]})
    return conversation_of(ChatBody.model_validate_json(body)).messages[0]


@pytest.mark.parametrize("empty", [{}, {"reasoning_content": None}, {"reasoning_content": ""}])
def test_reasoning_is_kept_beside_an_empty_one(empty: dict[str, Any]) -> None:
    assert read(reasoning="R", **empty)["reasoning_content"] == "R"
    assert read(reasoning="R", reasoning_content="S")["reasoning_content"] == "S"
    assert read(reasoning="", reasoning_content="S")["reasoning_content"] == "S"


@pytest.mark.parametrize("empty", [{}, {"tool_calls": None}, {"tool_calls": []}])
def test_an_old_call_is_kept_beside_an_empty_list(empty: dict[str, Any]) -> None:
    old, new = ({"name": name, "arguments": "{}"} for name in ("f", "g"))
    assert read(function_call=old, **empty)["tool_calls"] == [{"type": "function", "function": old}]
    assert read(function_call=old, tool_calls=[{"function": new}])["tool_calls"] == [{"type": "function", "function": new}]
