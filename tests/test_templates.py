"""The test templates render what templates of their kind do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

import tiny
from headstart.prompt.chat_template import Template
from templates import REASONING, TOOLS

Messages = list[dict[str, Any]]

HEAD = "<|im_start|>assistant\n<think>\n"
THOUGHT = "<think>\nhm\n</think>\n\n"


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **extra}


def call(name: str, arguments: object) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": content}


def chatml(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def render(source: str, messages: Messages, tools: Sequence[dict[str, Any]] | None = None, *, reply: bool = False) -> str:
    return Template(source, {}).render(messages, tools=tools, generation=reply)


REPLIES = [
    assistant("yes", reasoning_content="hm"),
    assistant("<think>\nhm\n</think>\n\nyes"),
    assistant("hm\n</think>\n\nyes"),
]
"""One reply with reasoning, in the three ways that clients send it back."""


@pytest.mark.parametrize("source", [REASONING, TOOLS])
@pytest.mark.parametrize("reply", REPLIES)
def test_reasoning_is_kept_until_the_next_user(source: str, reply: dict[str, Any]) -> None:
    before: Messages = [user("a"), reply, tool("1"), reply]
    kept = render(source, before)
    assert kept.count(THOUGHT + "yes") == 2
    stripped = render(source, [*before, user("b")])
    assert "hm" not in stripped
    assert stripped == kept.replace(THOUGHT, "") + chatml(("user", "b"))


@pytest.mark.parametrize("source", [REASONING, TOOLS])
def test_a_reply_without_reasoning_stays_as_it_is(source: str) -> None:
    messages = [{"role": "system", "content": "s"}, user("a"), assistant("\nyes \n"), user("b")]
    assert render(source, messages) == chatml(("system", "s"), ("user", "a"), ("assistant", "\nyes \n"), ("user", "b"))


def test_a_reply_goes_on_behind_the_header() -> None:
    """What the model wrote after the header, sent back in a tool loop, is the same text."""
    wrote = "hm\n</think>\n\nyes"
    header = render(REASONING, [user("a")], reply=True)
    assert header == chatml(("user", "a")) + HEAD
    assert render(REASONING, [user("a"), assistant(wrote), tool("1")]).startswith(header + wrote + "<|im_end|>\n")
    header = render(TOOLS, [user("a")], reply=True)
    wrote = THOUGHT + 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    sent = assistant("I look.", reasoning_content="hm", tool_calls=[call("look", {"at": 1})])
    assert render(TOOLS, [user("a"), sent, tool("1")]).startswith(header + wrote + "<|im_end|>\n")


def test_tools_and_their_results() -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    calls = assistant("", tool_calls=[call("look", '{"at": 1}'), call("look", {"at": 2})])
    text = render(TOOLS, [{"role": "system", "content": "s"}, user("a"), calls, tool("x"), tool("y")], [look, look], reply=True)
    line = '{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}'
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith(f"<|im_start|>system\ns\n\nFunctions that you can call:\n<tools>\n{line}\n{line}\n</tools>\n")
    written = [f'<tool_call>\n{{"name": "look", "arguments": {{"at": {at}}}}}\n</tool_call>' for at in (1, 2)]
    results = "<tool_response>\nx\n</tool_response>\n<tool_response>\ny\n</tool_response>"
    assert rest == chatml(("user", "a"), ("assistant", "\n".join(written)), ("user", results)) + "<|im_start|>assistant\n"
    assert render(TOOLS, [user("a")], [look]).startswith("<|im_start|>system\nFunctions")
    assert render(TOOLS, [user("a")]) == chatml(("user", "a"))


@pytest.mark.parametrize("source", [REASONING, TOOLS])
def test_a_model_carries_it(source: str, tmp_path: Path) -> None:
    fields = gguf.GGUFReader(tiny.write(tmp_path / "model.gguf", chat_template=source)).fields
    assert fields["tokenizer.chat_template"].contents() == source
    plain = gguf.GGUFReader(tiny.write(tmp_path / "plain.gguf")).fields["tokenizer.chat_template"].contents()
    assert "SmolLM" in plain
