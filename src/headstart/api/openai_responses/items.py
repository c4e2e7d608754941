"""Responses' items: from what a body holds to the messages and tools of a dialogue.

A reply is several items here and one message in a template: reasoning, text and calls that follow each other are one
message again, the same that the chat endpoint makes of it.
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
    """`encrypted_content` of some reasoning: not secret, but opaque, and all there is to know of it."""
    return base64.b64encode(_SEAL + text.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: str) -> str | None:
    """What `seal` was given; None if it is not ours."""
    try:
        data = base64.b64decode(sealed, validate=True)
        return data.removeprefix(_SEAL).decode("utf-8", "surrogatepass") if data.startswith(_SEAL) else None
    except (binascii.Error, ValueError):
        return None


_SILENT: dict[str, ResponsesItem] = {"function_call": {"arguments": ""}, "custom_tool_call": {"input": ""}}
"""What items of a kind have where nothing is said."""


def whole(given: Mapping[str, Any]) -> ResponsesItem:
    """An item of a body as it is kept: without nulls, and with all that clients expect of one that they get back."""
    item = without_nulls(given, "content", "output", "summary")
    kind = item.get("type", "message" if "role" in item else None)
    return {**({"type": kind} if kind else {}), **_SILENT.get(kind or "", {}), **item}


# ── items → messages ─────────────────────────────────────────────────────────────────────────────────────────────────


def messages_of(items: Iterable[ResponsesItem]) -> list[Message]:
    """The messages that items make."""
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
    """Whether an item is of another reply: text behind text, or reasoning behind text. Calls have to be answered first."""
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
"""How an assistant's message grows by an item of each kind."""


def _content(content: Any) -> Any:
    """A content as chat has it: a text, or text parts."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.get("text") or part.get("refusal") or "", **_hints(part)} for part in content]


def _plain(content: Any) -> str:
    # The parts of a reply are its text, cut; they were never joined by anything.
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _hinted(content: Any) -> bool:
    return isinstance(content, list) and any(len(part) > len(("type", "text")) for part in content)


def _hints(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value[key] for key in ("cache_control", "prompt_cache_breakpoint") if value.get(key) is not None}


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False}
"""The parameters of a custom tool, which takes a text."""


def as_arguments(text: str) -> str:
    """The arguments of a call of a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


def as_text(arguments: str) -> str:
    """The text that the arguments of a custom tool's call hold; the arguments themselves if they are something else."""
    try:
        return str(json_value(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return arguments


def _full_name(namespace: str | None, name: str) -> str:
    return f"{namespace}.{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class DeclaredCall:
    """A tool as a body names it. `custom`: it takes a text."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """A body's tools. `offered`: to the model; `named`: the full names of those; `ignored`: kinds that are not offered."""

    offered: tuple[Tool, ...]
    named: Mapping[str, DeclaredCall]
    ignored: tuple[str, ...]

    def called(self, name: str) -> DeclaredCall:
        """What a model means by a name; it may make one up."""
        return self.named.get(name) or DeclaredCall(name)


def tools_of(given: Sequence[ResponsesTool]) -> Tools:
    """What a body's tools are to a model."""
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
    """What a custom tool says about its text."""
    form = (tool.model_extra or {}).get("format")
    definition = form.get("definition") if isinstance(form, dict) else None
    return f"The input follows this grammar:\n{definition}" if isinstance(definition, str) else None
