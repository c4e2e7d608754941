"""Normalise: one canonical form of messages and tools, so that two ways to say the same render to the same text.

    "content": "a"                          ≡  "content": [{"type": "text", "text": "a"}]
    "role": "developer"                     ≡  "role": "system"
    "cache_control": …, "index": …          are not part of a prompt

Values are never changed in place: what comes out shares only what nobody writes to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headstart.api.schema import ChatMessage, TextPart, ToolCall

JOIN = "\n"
"""Between the text parts of one message (as llama-server and vLLM do)."""

HINTS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Keys that tell a cache something and a model nothing."""


def normalise(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates get them: `content` is always a string; absent fields are absent."""
    return [_message(message) for message in messages]


def normalise_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools without hints to the cache; None if there are none."""
    return [_without_hints(tool) for tool in tools] if tools else None


def _message(message: ChatMessage) -> dict[str, Any]:
    form: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content),
    }
    for key in ("name", "reasoning_content", "tool_call_id"):
        value = getattr(message, key)
        if value is not None:
            form[key] = value
    if message.tool_calls:
        form["tool_calls"] = [_call(call) for call in message.tool_calls]
    return form


def _text(content: str | Sequence[TextPart] | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else JOIN.join(part.text for part in content)


def _call(call: ToolCall) -> dict[str, Any]:
    # Keys in one order, for templates that write the whole call; arguments as given, for they are the model's own text.
    function = {"name": call.function.name, "arguments": call.function.arguments}
    form = {"type": call.type, "function": {key: value for key, value in function.items() if value is not None}}
    return form if call.id is None else {"id": call.id, **form}


def _without_hints(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in HINTS}
