"""Ollama conversation: a body of /api/chat or /api/generate → the `Conversation` that all dialects share.

Ollama's clients send no ids with tool calls. Here each call gets an id that follows from the messages before it and its place
in the reply, so that the same call has the same id in the reply and in every later request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from blake3 import blake3

from headstart.api.ollama.schema import (
    CalledTool,
    OllamaBody,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaTool,
)
from headstart.chat.messages import effort, without_nulls
from headstart.chat.reply_builder import call_id
from headstart.interfaces.conversation import Conversation, Message


def conversation_of(body: OllamaChatRequest, salt: str = "") -> Conversation:
    """The conversation of a body with messages."""
    messages = body.messages or []
    last = messages[-1]
    return Conversation(
        messages=tuple(_messages(messages)),
        tools=tuple(map(_tool, body.tools or ())),
        format=body.reply_format,
        template_kwargs=_thinking(body),
        salt=salt,
        continues=last["role"] == "assistant" and bool(last.get("content")) and not last.get("tool_calls"),
    )


def generate_conversation(body: OllamaGenerateRequest, salt: str = "") -> Conversation:
    """The conversation of a prompt with a template."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return Conversation(
        messages=(*system, {"role": "user", "content": body.prompt or ""}),
        format=body.reply_format,
        template_kwargs=_thinking(body),
        salt=salt,
    )


def reply_seed(messages: Iterable[Message]) -> str:
    """The seed of the ids of the calls in a reply to these messages. What clients change or leave out has no effect on it:
    reasoning, ids, the order of arguments."""
    digest = _Seed()
    for message in messages:
        digest.add(message)
    return digest.value


class _Seed:
    """`reply_seed` of a growing conversation."""

    def __init__(self) -> None:
        self._hasher = blake3()

    def add(self, message: Message) -> None:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        self._hasher.update(json.dumps([message["role"], message.get("content"), calls], sort_keys=True).encode())

    @property
    def value(self) -> str:
        return self._hasher.hexdigest()


def _messages(given: Iterable[OllamaMessage]) -> Iterator[Message]:
    seed, open_calls = _Seed(), OpenCalls()
    for message in given:
        written: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
        if thinking := message.get("thinking"):
            written["reasoning_content"] = thinking
        if calls := message.get("tool_calls"):
            written["tool_calls"] = [_call(call, call_id(seed.value, 0, index)) for index, call in enumerate(calls)]
            open_calls.add(written["tool_calls"])
        if message["role"] == "tool":
            written |= open_calls.answer(message.get("tool_name"), message.get("tool_call_id"))
        seed.add(written)
        yield written


class OpenCalls:
    """The calls of the last reply with calls that have no result yet."""

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []

    def add(self, calls: Iterable[dict[str, Any]]) -> None:
        """The calls of another reply. Those before get no result any more."""
        self._calls = list(calls)

    def answer(self, name: str | None, identity: str | None) -> dict[str, str]:
        """The fields that tie a result to its call: that with this id, else the next one of the tool `name`; with neither, the
        next one."""
        for call in self._calls:
            if identity == call["id"] if identity else name in (None, "", call["function"]["name"]):
                self._calls.remove(call)
                return {"name": name or call["function"]["name"], "tool_call_id": call["id"]}
        return {**({"name": name} if name else {}), **({"tool_call_id": identity} if identity else {})}


def _call(given: CalledTool, identity: str) -> dict[str, Any]:
    function = given["function"]
    called = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return {"id": given.get("id") or identity, "type": "function", "function": called}


def _tool(given: OllamaTool) -> Mapping[str, Any]:
    return {"type": "function", "function": without_nulls(given["function"])}


def _thinking(body: OllamaBody) -> dict[str, Any]:
    """The variables of reasoning models' templates. Without `think` they are left to the template."""
    if body.think is None or body.think == "":
        return {}
    return {"enable_thinking": body.think} if isinstance(body.think, bool) else effort(body.think)
