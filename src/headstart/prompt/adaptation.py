"""Adaptation: a conversation in the form that the model's chat template can render.

All dialects give conversations in one form (OpenAI's). Templates differ in what they take of it. Each function below mends one
thing that a template lacks. A longer conversation begins with the result of a shorter one, so what was computed for that one
can be reused.

Example: Gemma 2 has no system message. Its text then stands in front of the first user message.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blake3 import blake3

from headstart.interfaces.conversation import Message
from headstart.interfaces.tokens import utf8
from headstart.output.formats import Family
from headstart.prompt.chat_template import Template

_Talk = Sequence[Message]
_ToolList = Sequence[Mapping[str, Any]]
_CallId = Callable[[Mapping[str, Any], int], str]
"""The id of a call, from the call and its number in the conversation."""

BLANK_LINE = "\n\n"
"""Stands between the texts of two messages that become one."""


def adapt(template: Template, family: Family, messages: _Talk, tools: _ToolList | None) -> tuple[_Talk, _ToolList | None]:
    """The messages and tools to render, for a template with this family of calls."""
    if family.adapted:
        messages, tools = tools_as_text(messages, tools, neighbours=template.neighbours), None
    if not template.several_calls:
        messages = single_calls(messages)
    if template.call_ids != "any":
        messages = renamed_calls(messages, {"nine": nine_characters, "named": function_and_number}[template.call_ids])
    if template.reasoning_field != "reasoning_content":
        messages = reasoning_in(template.reasoning_field, messages, with_content=template.content_beside_reasoning)
    if not template.system_role:
        messages = system_as_user(messages)
    return messages, tools


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_json = json.JSONEncoder(ensure_ascii=False).encode

_LISTED = """# Tools

You can call these functions:
<tools>
{tools}
</tools>

To call one, answer with its name and arguments as JSON:
<tool_call>
{{"name": "the function's name", "arguments": {{"key": "value"}}}}
</tool_call>

Its result comes back between <tool_response> and </tool_response>."""


def tools_as_text(messages: _Talk, tools: _ToolList | None, *, neighbours: bool) -> _Talk:
    """For a template without tools: they are listed in the system message, calls are text of the assistant, results the user's.

    Consecutive results become one message, together with a user message directly after them, unless the template accepts
    `neighbours`: two user messages in a row.
    """
    listed = _LISTED.format(tools="\n".join(map(_json, tools))) if tools else ""
    adapted: list[dict[str, Any]] = []
    answered = False  # whether the last message holds results
    for number, message in enumerate(messages):
        role = message.get("role")
        content = _text(message.get("content"))
        if number == 0 and listed:
            head = role in ("system", "developer")
            text = BLANK_LINE.join(filter(None, (content if head else "", listed)))
            adapted.append({"role": "system", "content": text})
            if head:
                continue
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if answered and (role == "tool" or (role == "user" and not neighbours)):
            adapted[-1] = {"role": "user", "content": adapted[-1]["content"] + "\n" + content}
        elif role == "tool":
            adapted.append({"role": "user", "content": content})
        elif message.get("tool_calls"):
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            parts = [content] if content else []
            adapted.append({**rest, "content": "\n".join([*parts, *map(_written, message["tool_calls"])])})
        else:
            adapted.append(dict(message))
        answered = role == "tool"
    return adapted


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    # With a line break between, as the rule `parts` joins them: without it, two parts could make a control token.
    return "\n".join(part.get("text") or "" for part in content or () if isinstance(part, Mapping))


def _written(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = _json(arguments or {})
    name = _json(function.get("name") or "")
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments or "{}"}}}\n</tool_call>'


class _OpenCalls:
    """The calls of one reply that have no result yet, each with what it is called here.

    A result answers the first call of its id. Ids may be missing: then it answers the next call.
    """

    def __init__(self, calls: Sequence[tuple[Any, Any]] = ()) -> None:
        self._calls = list(calls)

    def answered(self, id: Any) -> Any:
        """What the call is called here that a result with this id answers; None if there is none."""
        ids = [given for given, _ in self._calls]
        wanted = id if id in ids else None
        if id is not None and wanted not in ids:
            return None
        return self._calls.pop(0 if id is None else ids.index(wanted))[1] if self._calls else None


def single_calls(messages: _Talk) -> _Talk:
    """For a template with one call a message (Llama 3): a reply with several becomes as many, each with its result."""
    adapted: list[Message] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            adapted.append(message)
            continue
        opened = _OpenCalls([(call.get("id"), place) for place, call in enumerate(calls)])
        results: list[list[Message]] = [[] for _ in calls]
        while rest and rest[0].get("role") == "tool":
            place = opened.answered(rest[0].get("tool_call_id"))
            results[-1 if place is None else place].append(rest.popleft())
        for place, call in enumerate(calls):
            told = {"role": message["role"], "content": ""} if place else message
            adapted += [{**told, "tool_calls": [call]}, *results[place]]
    return adapted


# ── ids of calls ─────────────────────────────────────────────────────────────────────────────────────────────────────


def renamed_calls(messages: _Talk, form: _CallId) -> _Talk:
    """For a template that takes some ids only: calls get ids of this form, and results the ids of their calls."""
    adapted: list[Message] = []
    opened, names = _OpenCalls(), dict[Any, str]()
    count = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [form(call, count + place) for place, call in enumerate(calls)]
            count += len(calls)
            opened = _OpenCalls([(call.get("id"), id) for call, id in zip(calls, ids, strict=True)])
            names.update((call.get("id"), id) for call, id in zip(calls, ids, strict=True))
            message = {**message, "tool_calls": [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]}
        elif message.get("role") == "tool":
            given = message.get("tool_call_id")
            id = opened.answered(given) or names.get(given) or form({"id": given}, count)
            message = {**message, "tool_call_id": id}
        adapted.append(message)
    return adapted


def nine_characters(call: Mapping[str, Any], number: int) -> str:
    """An id of nine letters or digits, as Mistral's models write them. It stays if it has that form."""
    id = str(call.get("id") or number)
    return id if re.fullmatch(r"[A-Za-z0-9]{9}", id) else blake3(utf8(id)).hexdigest()[:9]


def function_and_number(call: Mapping[str, Any], number: int) -> str:
    """An id with the name of the function and the number of the call, as Kimi's models write them."""
    return f"functions.{(call.get('function') or {}).get('name') or 'unknown'}:{number}"


# ── reasoning and system messages ────────────────────────────────────────────────────────────────────────────────────


def reasoning_in(field: str, messages: _Talk, *, with_content: bool) -> _Talk:
    """For a template that looks for reasoning in another field (gpt-oss: `thinking`).

    Args:
        with_content: whether a reply with calls may have content beside it. Else its content is added to the reasoning.
    """

    def moved(message: Message) -> Message:
        reasoning = message.get("reasoning_content")
        if not reasoning or message.get("role") != "assistant":
            return message
        rest = {key: value for key, value in message.items() if key != "reasoning_content"}
        content = _text(message.get("content"))
        if with_content or not content or not message.get("tool_calls"):
            return {**rest, field: reasoning}
        return {**rest, field: reasoning + BLANK_LINE + content, "content": ""}

    return [*map(moved, messages)]


def system_as_user(messages: _Talk) -> _Talk:
    """For a template without system messages (Gemma 2): the text of the first one stands in front of the first user's."""
    if not messages or messages[0].get("role") not in ("system", "developer"):
        return messages
    system, *rest = messages
    text = _text(system.get("content"))
    if rest and not text:
        return rest
    if not rest or rest[0].get("role") != "user":
        return [{"role": "user", "content": text}, *rest]
    content = rest[0].get("content")
    if isinstance(content, list):
        return [{**rest[0], "content": [{"type": "text", "text": text + BLANK_LINE}, *content]}, *rest[1:]]
    return [{**rest[0], "content": text + BLANK_LINE + (content or "")}, *rest[1:]]
