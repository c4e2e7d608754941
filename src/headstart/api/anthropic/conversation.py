"""Anthropic conversation: a body of /v1/messages → the `Conversation` that all dialects share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from headstart.api.anthropic.schema import (
    WRITTEN,
    AnyMessage,
    ClientTool,
    CountTokensRequest,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    Written,
    left_out,
)
from headstart.chat.messages import without_nulls
from headstart.interfaces.conversation import Conversation, Message, Tool

FAILED = "Error:"
"""Beginning of a result with `is_error`, because templates have no mark for errors."""


def conversation_of(body: CountTokensRequest, salt: str = "") -> Conversation:
    """The conversation of a body. Adjacent messages with one role become one turn. In a user's turn, tool results come before
    text, because templates need that order."""
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": _content(body.system)})
    for role, run in groupby(body.messages, key=lambda message: message["role"]):
        turn = list(run)
        messages += [_assistant(turn)] if role == "assistant" else _others(role, turn)
    messages[-1] = {**messages[-1], **_mark({"cache_control": body.cache_control})}
    return Conversation(
        messages=tuple(messages),
        tools=tuple(_tool(tool) for tool in body.tools or () if not left_out(tool)),
        choice=body.choice,
        format=body.format,
        template_kwargs=_template_kwargs(body),
        salt=salt,
        continues=body.messages[-1]["role"] == "assistant",
    )


def _others(role: str, turn: Iterable[AnyMessage]) -> Iterator[Message]:
    parts: list[dict[str, Any]] = []
    only = True
    for message in turn:
        for block in _blocks(message):
            if block["type"] == "tool_result":
                only = False
                yield _result(block)
            elif block["type"] in WRITTEN:
                parts += _parts([block])
    if parts or only:
        yield {"role": role, "content": parts or ""}


def _assistant(turn: Iterable[AnyMessage]) -> Message:
    written: list[str] = []
    thought: list[str] = []
    calls: list[dict[str, Any]] = []
    marks: dict[str, Any] = {}
    for message in turn:
        text = ""  # the text blocks of one message are one reply
        for block in _blocks(message):
            if block["type"] == "text":
                text += block["text"]
            elif block["type"] == "thinking":
                thought.append(block["thinking"])
            elif block["type"] == "tool_use":
                calls.append({"id": block["id"], "type": "function", "function": _called(block)})
            marks |= _mark(block)
        written.append(text)
    reasoning = "\n".join(filter(None, thought))
    return {
        "role": "assistant",
        "content": "\n".join(filter(None, written)),
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
        **marks,
    }


def _called(block: ToolUseBlock) -> dict[str, Any]:
    given = block["input"]
    return {"name": block["name"], "arguments": given if isinstance(given, dict) else json.dumps(given, ensure_ascii=False)}


def _result(block: ToolResultBlock) -> Message:
    content = _content(block.get("content") or "")
    if block.get("is_error"):
        rest = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        content = [{"type": "text", "text": FAILED}, *rest]
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content, **_mark(block)}


def _blocks(message: AnyMessage) -> Sequence[Any]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _content(content: str | Sequence[Written]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else _parts(content)


def _parts(blocks: Iterable[Written]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": _text(block), **_mark(block)} for block in blocks]


def _text(block: Written) -> str:
    if block["type"] == "text":
        return block["text"]
    if block["type"] == "search_result":
        return _tagged("search_result", title=block["title"], source=block["source"], content=_joined(block["content"]))
    source = block["source"]
    text = source["data"] if source["type"] == "text" else _joined(source["content"])
    return _tagged("document", title=block.get("title"), context=block.get("context"), document_content=text)


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block["text"] for block in content)


def _tagged(tag: str, **fields: str | None) -> str:
    inner = "\n".join(f"<{name}>\n{text}\n</{name}>" for name, text in fields.items() if text)
    return f"<{tag}>\n{inner}\n</{tag}>"


def _tool(tool: ClientTool) -> Tool:
    given = {"description": tool.get("description"), "parameters": tool.get("input_schema"), "strict": tool.get("strict")}
    return {"type": "function", "function": {"name": tool["name"], **without_nulls(given)}, **_mark(tool)}


def _mark(block: Mapping[str, Any]) -> dict[str, Any]:
    mark = block.get("cache_control")
    return {} if mark is None else {"cache_control": without_nulls(mark)}


def _template_kwargs(body: CountTokensRequest) -> dict[str, Any]:
    """The variables of reasoning models' templates. Options that the body does not set are left to the template."""
    extra: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.wanted is not None:
        extra["enable_thinking"] = body.thinking.wanted
    if body.output_config is not None and body.output_config.effort is not None:
        extra["reasoning_effort"] = body.output_config.effort
    return extra
