"""A reply that ends in the middle of a call or of reasoning, in every dialect, streamed or not: no mark is ever said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from effort import SLOW
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from live import Server, serving, wait_until
from scripted import Scripted
from templates import TOOLS

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}}
LS = {"name": "ls", "description": "Lists a folder.", "parameters": SCHEMA}
THOUGHT, TEXT = "They want a list.", "I look."
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "/etc"}}\n</tool_call>'
REPLY = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n\n{CALL}"
ASK: list[Any] = [{"role": "user", "content": "What is in /etc?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = Scripted(FakeEngine(slots=2, ctx=4096, tokenizer=FakeTokenizer(chat_template=TOOLS)))
    with Runtime(lambda: engine, Settings(memory_budget=64 << 20)) as runtime, serving(runtime, model_id="fake") as served:
        yield served


Said = tuple[str, str, str]
"""Text, reasoning and arguments of calls."""


def chat(server: Server, stream: bool, limit: int, stop: list[str]) -> Said:
    answer: Any = server.openai.chat.completions.create(
        model="fake", messages=ASK, tools=[{"type": "function", "function": LS}], max_tokens=limit, stop=stop, stream=stream
    )
    parts = [choice.delta for chunk in answer for choice in chunk.choices] if stream else [answer.choices[0].message]
    calls = [call.function.arguments or "" for part in parts for call in part.tool_calls or ()]
    reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    return "".join(part.content or "" for part in parts), reasoning, "".join(calls)


def messages(server: Server, stream: bool, limit: int, stop: list[str]) -> Said:
    tool = {"name": "ls", "description": "Lists a folder.", "input_schema": SCHEMA}
    options: Any = {"model": "fake", "messages": ASK, "tools": [tool], "max_tokens": limit, "stop_sequences": stop}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        if stream:
            with claude.messages.stream(**options, thinking={"type": "enabled", "budget_tokens": 1024}) as events:
                answer: Any = events.get_final_message()
        else:
            answer = claude.messages.create(**options, thinking={"type": "enabled", "budget_tokens": 1024})
    kinds = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    parts = [[getattr(block, kinds[kind]) for block in answer.content if block.type == kind] for kind in kinds]
    return "".join(parts[0]), "".join(parts[1]), str(parts[2][0]) if parts[2] and parts[2][0] else ""


def responses(server: Server, stream: bool, limit: int, stop: list[str]) -> Said:
    tool: Any = {"type": "function", "strict": False, **LS}
    answer: Any = server.openai.responses.create(model="fake", input=ASK, tools=[tool], max_output_tokens=limit, stream=stream)
    if stream:
        *_, last = answer
        answer = last.response
    thought = [part.text for item in answer.output if item.type == "reasoning" for part in item.content or ()]
    calls = [item.arguments for item in answer.output if item.type == "function_call"]
    return answer.output_text, "".join(thought), "".join(calls)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", [chat, messages, responses], ids=lambda dialect: dialect.__name__)
def test_no_mark_is_said_wherever_a_reply_is_cut(server: Server, dialect: Any, stream: bool) -> None:
    assert server.runtime is not None
    engine = server.runtime.engine
    assert isinstance(engine, Scripted)
    marks = [REPLY.index(mark) for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    for limit in sorted({*range(1, len(REPLY), 9 if SLOW else 27), *(at + more for at in marks for more in (1, 2, 6))}):
        engine.say(REPLY)
        text, thought, _ = dialect(server, stream, limit, [])
        assert TEXT.startswith(text.strip())
        assert THOUGHT.startswith(thought.strip())
    if dialect is not responses:  # which has no stop texts
        for stop, expected in (("l_call>", TEXT), ('"name"', TEXT), ("hink>\n\n", "")):
            engine.say(REPLY)
            text, thought, _ = dialect(server, stream, 400, [stop])
            assert (text.strip(), thought.strip()) == (expected, THOUGHT)


def test_a_cut_reply_settles_as_the_client_has_it(server: Server) -> None:
    """What the engine computes when idle is what comes back: the text without the mark."""
    assert server.runtime is not None
    engine = server.runtime.engine
    assert isinstance(engine, Scripted)
    engine.say("I look around in it.\n<tool_call>", "So.")
    asked: list[Any] = [{"role": "user", "content": "What is in there, and where does all of it come from?"}]
    tools: Any = [{"type": "function", "function": LS}]
    create = server.openai.chat.completions.create
    answer: Any = create(model="fake", messages=asked, tools=tools, max_tokens=len("I look around in it.\n<tool_"))
    wait_until(lambda: server.idle() and server.runtime.scheduler.idle)  # type: ignore[union-attr]
    server.runtime.scheduler._admission.pace.restore = 0.0  # on a busy machine it may seem slower than to compute
    back = [*asked, answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
    again: Any = create(model="fake", messages=back, tools=tools, max_tokens=10)
    assert answer.choices[0].message.content == "I look around in it."
    assert again.headstart["computed"] <= len("And?") + 2 * 30 + 8
    assert again.headstart["cause"] is None
