"""Responses' items: a body's items and tools → the messages and tools of a conversation.

Here a reply consists of several items, but templates take one message. So reasoning, text and calls in a row become one
message, the same as in the chat endpoint.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.api.openai_responses.schema import ResponsesTool
from headstart.chat.messages import without_nulls
from headstart.interfaces.conversation import Message, Tool
from headstart.output.json_values import json_value

ResponsesItem = dict[str, Any]

_SEAL = b"headstart.reasoning.1\n"


def seal(text: str) -> str:
    """`encrypted_content` for some reasoning. It is not secret, only encoded, and contains all of the text."""
    return base64.b64encode(_SEAL + text.encode("utf-8", "replace")).decode()


def unseal(sealed: str) -> str | None:
    """The text that `seal` encoded; None if `sealed` comes from another server."""
    try:
        data = base64.b64decode(sealed, validate=True)
        return data.removeprefix(_SEAL).decode("utf-8") if data.startswith(_SEAL) else None
    except (binascii.Error, ValueError):
        return None


_SILENT: dict[str, ResponsesItem] = {"function_call": {"arguments": ""}, "custom_tool_call": {"input": ""}}
"""Default fields of items, by their type."""


def whole(given: Mapping[str, Any]) -> ResponsesItem:
    """An item of a body in the form in which it is stored: without nulls, and with all fields that clients expect."""
    item = without_nulls(given, "content", "output", "summary")
    kind = item.get("type", "message" if "role" in item else None)
    return {**({"type": kind} if kind else {}), **_SILENT.get(kind or "", {}), **item}


# ── items → messages ─────────────────────────────────────────────────────────────────────────────────────────────────


def messages_of(items: Iterable[ResponsesItem]) -> list[Message]:
    """The messages of some items."""
    messages: list[Message] = []
    reply: dict[str, Any] | None = None  # the assistant's message that is still growing
    for item in items:
        kind = item.get("type", "message")
        if kind == "message" and item["role"] != "assistant":
            reply = None
            messages.append({"role": item["role"], "content": _content(item["content"]), **_hints(item)})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            reply = None
            content = _content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content, **_hints(item)})
        elif kind in _GROW:
            if reply is None or _begins_another(kind, reply):
                reply = {"role": "assistant", "content": ""}
                messages.append(reply)
            _GROW[kind](reply, item)
    return messages


def _begins_another(kind: str, reply: dict[str, Any]) -> bool:
    """Whether an item begins another reply: text or reasoning after text. After a call, the call's output ends the reply."""
    return kind in ("message", "reasoning") and bool(reply["content"]) and "tool_calls" not in reply


def _grow_text(reply: dict[str, Any], item: ResponsesItem) -> None:
    content = _content(item["content"])
    if reply["content"]:
        reply["content"] = _plain(reply["content"]) + _plain(content)
    else:
        reply["content"] = content if _hinted(content) else _plain(content)


def _grow_reasoning(reply: dict[str, Any], item: ResponsesItem) -> None:
    own = unseal(item.get("encrypted_content") or "")
    text = own if own is not None else _plain(_content(item.get("content") or item.get("summary") or []))
    if text:
        reply["reasoning_content"] = reply.get("reasoning_content", "") + text


def _grow_call(reply: dict[str, Any], item: ResponsesItem) -> None:
    arguments = item.get("arguments", "") if item["type"] == "function_call" else as_arguments(item.get("input", ""))
    function = {"name": _full_name(item.get("namespace"), item["name"]), "arguments": arguments}
    reply.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


_GROW = {
    "message": _grow_text,
    "reasoning": _grow_reasoning,
    "function_call": _grow_call,
    "custom_tool_call": _grow_call,
}
"""Adds an item of each type to an assistant's message."""


def _content(content: Any) -> Any:
    """Content in the format of chats: a text, or text parts."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.get("text") or part.get("refusal") or "", **_hints(part)} for part in content]


def _plain(content: Any) -> str:
    # The parts of a reply are sections of one text, so nothing separates them.
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _hinted(content: Any) -> bool:
    return isinstance(content, list) and any(len(part) > len(("type", "text")) for part in content)


def _hints(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value[key] for key in ("cache_control", "prompt_cache_breakpoint") if value.get(key) is not None}


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False}
"""The parameters of a custom tool. Its input is one text."""


def as_arguments(text: str) -> str:
    """The arguments of a custom tool's call with this text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def as_text(arguments: str) -> str:
    """The text in the arguments of a custom tool's call; the arguments themselves if they have another form."""
    try:
        return str(json_value(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return arguments


def _full_name(namespace: str | None, name: str) -> str:
    return f"{namespace}.{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class DeclaredCall:
    """A tool as the body declares it. `custom`: its input is a text."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """A body's tools. `offered`: to the model; `named`: the same by full name; `ignored`: types that are not offered."""

    offered: tuple[Tool, ...]
    named: Mapping[str, DeclaredCall]
    ignored: tuple[str, ...]

    def called(self, name: str) -> DeclaredCall:
        """The tool that a model means by a name. Models may invent names."""
        return self.named.get(name) or DeclaredCall(name)


def tools_of(given: Sequence[ResponsesTool]) -> Tools:
    """A body's tools in the form that the model sees."""
    offered: list[Tool] = []
    named: dict[str, DeclaredCall] = {}
    ignored: list[str] = []

    def add(tools: Sequence[ResponsesTool], namespace: str | None) -> None:
        for tool in tools:
            if tool.type == "namespace" and namespace is None:
                add(tool.tools or (), tool.name)
            elif tool.type in ("function", "custom") and tool.name is not None:
                name = _full_name(namespace, tool.name)
                named[name] = DeclaredCall(tool.name, namespace, tool.type == "custom")
                offered.append({"type": "function", "function": _function(tool, name)})
            else:
                ignored.append(tool.type)

    add(given, None)
    return Tools(tuple(offered), named, tuple(dict.fromkeys(ignored)))


def _function(tool: ResponsesTool, name: str) -> dict[str, Any]:
    custom = tool.type == "custom"
    described = "\n\n".join(filter(None, [tool.description, _grammar_of(tool) if custom else None]))
    parameters = _TEXT if custom else tool.parameters
    return {
        "name": name,
        **({"description": described} if described else {}),
        **({"parameters": parameters} if parameters is not None else {}),
        **({"strict": tool.strict} if tool.strict is not None else {}),
    }


def _grammar_of(tool: ResponsesTool) -> str | None:
    """The grammar that a custom tool declares for its input."""
    syntax = (tool.model_extra or {}).get("format")
    definition = syntax.get("definition") if isinstance(syntax, dict) else None
    return f"The input follows this grammar:\n{definition}" if isinstance(definition, str) else None
