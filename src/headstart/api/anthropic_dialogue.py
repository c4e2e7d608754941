"""Anthropic dialogue: what a body of /v1/messages says, in the form that all dialects share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from headstart.api.anthropic_schema import (
    AnyMessage,
    AssistantMessage,
    ClientTool,
    CountTokensRequest,
    DocumentBlock,
    Marked,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Written,
)
from headstart.api.canonical import Dialogue, Message, Tool

FAILED = "Error:"
"""What a result that `is_error` begins with: templates know no such mark."""


def dialogue_of(form: CountTokensRequest, salt: str = "") -> Dialogue:
    """Reads a body. Neighbours of one role become one turn; in a user's, results come before text, as templates need it."""
    messages: list[Message] = []
    if form.system:
        messages.append({"role": "system", "content": _content(form.system)})
    for role, run in groupby(form.messages, key=lambda message: message.role):
        turn = list(run)
        messages += [_assistant(turn)] if role == "assistant" else _others(role, turn)
    if form.cache_control is not None:
        messages[-1] = {**messages[-1], **_mark(form)}
    return Dialogue(
        messages=tuple(messages),
        tools=tuple(_tool(tool) for tool in form.tools or () if not tool.left_out),
        choice=form.choice,
        format=form.format,
        extra=_extra(form),
        salt=salt,
        continues=isinstance(form.messages[-1], AssistantMessage),
    )


def _others(role: str, turn: Iterable[AnyMessage]) -> Iterator[Message]:
    parts: list[dict[str, Any]] = []
    only = True
    for message in turn:
        for block in _blocks(message):
            if isinstance(block, ToolResultBlock):
                only = False
                yield _result(block)
            elif isinstance(block, Written):
                parts += _parts([block])
    if parts or only:
        yield {"role": role, "content": parts or ""}


def _assistant(turn: Iterable[AnyMessage]) -> Message:
    said: list[str] = []
    thought: list[str] = []
    calls: list[dict[str, Any]] = []
    marks: dict[str, Any] = {}
    for message in turn:
        text = ""  # blocks of one message are one reply, cut where something else was between them
        for block in _blocks(message):
            if isinstance(block, TextBlock):
                text += block.text
            elif isinstance(block, ThinkingBlock):
                thought.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                calls.append({"id": block.id, "type": "function", "function": _called(block)})
            if isinstance(block, Marked):
                marks |= _mark(block)
        said.append(text)
    reasoning = "\n".join(filter(None, thought))
    return {
        "role": "assistant",
        "content": "\n".join(filter(None, said)),
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
        **marks,
    }


def _called(block: ToolUseBlock) -> dict[str, Any]:
    given = block.input
    return {"name": block.name, "arguments": given if isinstance(given, dict) else json.dumps(given, ensure_ascii=False)}


def _result(block: ToolResultBlock) -> Message:
    content = _content(block.content or "")
    if block.is_error:
        rest = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        content = [{"type": "text", "text": FAILED}, *rest]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content, **_mark(block)}


def _blocks(message: AnyMessage) -> Sequence[Any]:
    content = message.content
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _content(content: str | Sequence[Written]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else _parts(content)


def _parts(blocks: Iterable[Written]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": _text(block), **_mark(block)} for block in blocks]


def _text(block: Written) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return _tagged("search_result", title=block.title, source=block.source, content=_joined(block.content))
    assert isinstance(block, DocumentBlock)
    source = block.source
    text = source.data if source.type == "text" else _joined(source.content)
    return _tagged("document", title=block.title, context=block.context, document_content=text)


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tagged(tag: str, **fields: str | None) -> str:
    inner = "\n".join(f"<{name}>\n{text}\n</{name}>" for name, text in fields.items() if text)
    return f"<{tag}>\n{inner}\n</{tag}>"


def _tool(tool: ClientTool) -> Tool:
    given = {"description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    function = {"name": tool.name, **{key: value for key, value in given.items() if value is not None}}
    return {"type": "function", "function": function, **_mark(tool)}


def _mark(block: Marked) -> dict[str, Any]:
    mark = block.cache_control
    return {} if mark is None else {"cache_control": mark.model_dump(exclude_none=True)}


def _extra(form: CountTokensRequest) -> dict[str, Any]:
    """As templates of reasoning models ask for it; what is not said is left to the template."""
    extra: dict[str, Any] = {}
    if form.thinking is not None and form.thinking.wanted is not None:
        extra["enable_thinking"] = form.thinking.wanted
    if form.output_config is not None and form.output_config.effort is not None:
        extra["reasoning_effort"] = form.output_config.effort
    return extra
