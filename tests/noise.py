"""Noise: the different forms in which clients send the same conversation again. Each client uses real HTTP, and remembers the
answers.

The forms are those of real clients; the texts are invented.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]

SYSTEM = "You help somebody who keeps notes in a folder. Read before you answer, and answer shortly. " * 6
ENVIRONMENT = "The folder is /home/ada/notes, the shell is bash, the machine is called otter. " * 4
TOOLS = [
    ("read_note", "Reads a note.", {"path": "string", "offset": "integer", "limit": "integer"}, ["path"]),
    ("find_note", "Finds notes that have a word in them.", {"word": "string", "deep": "boolean"}, ["word"]),
    ("write_note", "Writes a note.", {"path": "string", "text": "string", "tags": "array"}, ["path", "text"]),
]


@dataclass(frozen=True)
class Result:
    """The result of a tool. Everything else that a user sends is text."""

    text: str


@dataclass(frozen=True)
class Reply:
    """A reply: the model's text, and what the client got of it."""

    script: str
    answer: Body


Entry = str | Result | Reply


def schema(types: dict[str, str], required: list[str]) -> Body:
    return {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}, "required": required}


def turned(value: Any) -> Any:
    """The same value, with the keys of all objects in another order."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    return [turned(item) for item in value] if isinstance(value, list) else value


@dataclass
class Speaker:
    """A client in a conversation. `number`: of the conversation; `log`: its messages and replies."""

    number: int
    log: list[Entry] = field(default_factory=list)

    path = ""

    def body(self) -> Body:
        """The next request."""
        raise NotImplementedError

    def clean(self, entry: Entry) -> list[dict[str, Any]]:
        """The next request without noise, as messages for the template. Replies have the model's own text."""
        return self.placed([message for said in (*self.log, entry) for message in self.said(said)])

    def placed(self, messages: list[Body]) -> list[Body]:
        return [{"role": "system", "content": SYSTEM}, *messages]

    def said(self, entry: Entry) -> list[Body]:
        if isinstance(entry, Reply):
            return [written(entry.script)]
        if isinstance(entry, Result):
            return [{"role": "tool", "tool_call_id": "call", "content": entry.text}]
        return [{"role": "user", "content": entry}]

    @property
    def asked(self) -> int:
        """Requests so far."""
        return sum(isinstance(entry, Reply) for entry in self.log)


def written(script: str) -> Body:
    """A reply as the model wrote it, with the exact text of its call's arguments."""
    reasoning, _, said = script.removeprefix("<think>\n").partition("\n</think>\n\n")
    message: Body = {"role": "assistant", "content": said, "reasoning_content": reasoning}
    if "<tool_call>" in said:
        message["content"], _, call = said.partition("\n<tool_call>\n")
        call = call.removesuffix("\n</tool_call>")
        arguments = call.partition('"arguments": ')[2].removesuffix("}")
        function = {"name": json.loads(call)["name"], "arguments": arguments}
        message["tool_calls"] = [{"id": "call", "type": "function", "function": function}]
    return message


# ── /v1/chat/completions ─────────────────────────────────────────────────────────────────────────────────────────────


class Chat(Speaker):
    """Changes the spacing of arguments as a JSON library does, and keeps or drops reasoning."""

    path = "/v1/chat/completions"
    respaced: Callable[[Any], str] = staticmethod(json.dumps)
    reasons = False

    def body(self) -> Body:
        messages = [{"role": "system", "content": SYSTEM}]
        for place, entry in enumerate(self.log):
            messages.append(self.message(entry, self.log[place - 1]))
        return {"model": "demo", "messages": messages, "tools": self.tools()}

    def message(self, entry: Entry, before: Entry) -> Body:
        if isinstance(entry, Reply):
            return self.returned(entry.answer["choices"][0]["message"])
        if isinstance(entry, Result):
            assert isinstance(before, Reply)
            call = before.answer["choices"][0]["message"]["tool_calls"][0]
            return {"role": "tool", "tool_call_id": call["id"], "content": entry.text}
        return {"role": "user", "content": entry}

    def returned(self, message: Body) -> Body:
        back: Body = {"role": "assistant", "content": message["content"]}
        if self.reasons:
            back["reasoning_content"] = message["reasoning_content"]
        if calls := message.get("tool_calls"):
            back["tool_calls"] = [{**call, "function": self.function(call["function"])} for call in calls]
        return back

    def function(self, function: Body) -> Body:
        return {"name": function["name"], "arguments": self.respaced(json.loads(function["arguments"]))}

    def tools(self) -> list[Body]:
        return [
            {"type": "function", "function": {"name": name, "description": what, "parameters": schema(types, required)}}
            for name, what, types, required in TOOLS
        ]


class Llm(Chat):
    """Python's separators, no reasoning, null for no content."""

    def returned(self, message: Body) -> Body:
        back = super().returned(message)
        return {**back, "content": back["content"] or None} if back.get("tool_calls") else back


class Opencode(Chat):
    """Compact arguments; reasoning is kept; a cache key; content sometimes as parts, sometimes as text."""

    respaced = staticmethod(lambda value: json.dumps(value, separators=(",", ":")))
    reasons = True

    def body(self) -> Body:
        body = super().body() | {"prompt_cache_key": f"ses_{self.number}"}
        if self.asked % 2:
            for message in body["messages"]:
                if message["role"] == "user":
                    message["content"] = [{"type": "text", "text": message["content"]}]
        return body


class Reordering(Chat):
    """Keys of arguments and tools in another order each time; `developer` in place of `system`; no reasoning."""

    respaced = staticmethod(lambda value: json.dumps(turned(value), indent=2))

    def body(self) -> Body:
        body = super().body()
        if self.asked % 2:
            body["messages"][0]["role"] = "developer"
        return body

    def tools(self) -> list[Body]:
        return turned(super().tools()) if self.asked % 2 else super().tools()


# ── /v1/messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

MARK = {"cache_control": {"type": "ephemeral"}}


class ClaudeCode(Speaker):
    """All changes of Claude Code together: a block that names the conversation, moving cache marks, text or blocks, keys in the
    schema's order, reasoning without its text, and a system message after the first user's."""

    path = "/v1/messages?beta=true"

    def body(self) -> Body:
        billing = f"x-anthropic-billing-header: cc_version=9.8.7.{self.number:03x}; cc_entrypoint=sdk-cli;"
        texts = [{"type": "text", "text": billing}, {"type": "text", "text": SYSTEM, **MARK}]
        messages: list[Body] = []
        for place, entry in enumerate(self.log):
            last = place == len(self.log) - 1
            messages.append(self.message(entry, self.log[place - 1], last))
            if place == 0:
                messages.append({"role": "system", "content": ENVIRONMENT})
        return {
            "model": "demo",
            "max_tokens": 1024,
            "system": texts,
            "messages": messages,
            "tools": self.tools(),
            "thinking": {"type": "adaptive", "display": "omitted"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": json.dumps({"session_id": self.number})},
        }

    def message(self, entry: Entry, before: Entry, last: bool) -> Body:
        if isinstance(entry, Reply):
            return {"role": "assistant", "content": [self.block(block) for block in entry.answer["content"]]}
        if isinstance(entry, Result):
            assert isinstance(before, Reply)
            call = before.answer["content"][-1]
            block = {"type": "tool_result", "tool_use_id": call["id"], "content": entry.text}
            return {"role": "user", "content": [{**block, **MARK} if last else block]}
        return {"role": "user", "content": [{"type": "text", "text": entry, **MARK}] if last else entry}

    def block(self, block: Body) -> Body:
        if block["type"] == "thinking":
            assert block["thinking"] == ""
        if block["type"] == "tool_use":
            known = next(types for name, _, types, _ in TOOLS if name == block["name"])
            block = {**block, "input": {key: block["input"][key] for key in known if key in block["input"]}}
        return {key: value for key, value in block.items() if value is not None}

    def tools(self) -> list[Body]:
        tools = [
            {"name": name, "description": what, "input_schema": schema(types, required)}
            for name, what, types, required in TOOLS
        ]
        return [*tools[:-1], {**tools[-1], **MARK}] if self.asked % 2 else tools

    def placed(self, messages: list[Body]) -> list[Body]:
        head, first, *rest = super().placed(messages)
        return [head, first, {"role": "system", "content": ENVIRONMENT}, *rest]


# ── /v1/responses ────────────────────────────────────────────────────────────────────────────────────────────────────


class Codex(Speaker):
    """It stores nothing, and sends the items back unchanged, with encrypted reasoning. The date is in a separate message."""

    path = "/v1/responses"

    @property
    def date(self) -> str:
        return f"<environment>\n  <cwd>/home/ada</cwd>\n  <date>2026-11-{self.number:02}</date>\n</environment>"

    def body(self) -> Body:
        items: list[Body] = [self.text(self.date)]
        for place, entry in enumerate(self.log):
            if isinstance(entry, Reply):
                items += [self.item(item) for item in entry.answer["output"]]
            elif isinstance(entry, Result):
                before = self.log[place - 1]
                assert isinstance(before, Reply)
                call = before.answer["output"][-1]["call_id"]
                items.append({"type": "function_call_output", "call_id": call, "output": entry.text})
            else:
                items.append(self.text(entry))
        return {
            "model": "demo",
            "instructions": SYSTEM,
            "input": items,
            "tools": self.tools(),
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": f"thread-{self.number}",
            "client_metadata": {"turn": str(self.asked)},
        }

    def text(self, text: str) -> Body:
        return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}

    def item(self, item: Body) -> Body:
        if item["type"] == "reasoning":
            assert item["encrypted_content"]
            return {"type": "reasoning", "summary": [], "content": None, "encrypted_content": item["encrypted_content"]}
        return {key: value for key, value in item.items() if key not in ("id", "status")}

    def tools(self) -> list[Body]:
        return [
            {"type": "function", "name": name, "description": what, "parameters": schema(types, required), "strict": False}
            for name, what, types, required in TOOLS
        ]

    def placed(self, messages: list[Body]) -> list[Body]:
        return super().placed([{"role": "user", "content": self.date}, *messages])


SPEAKERS: tuple[type[Speaker], ...] = (Llm, Opencode, Reordering, ClaudeCode, Codex)
