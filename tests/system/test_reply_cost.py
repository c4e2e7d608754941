"""What a reply costs besides its tokens: it is parsed once, its turn is rendered twice, and never on the engine's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest

from headstart.config import Settings
from headstart.library.headstart import Headstart
from headstart.output.parser import Parser
from headstart.prompt.chat_template import Template
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from live import serving, wait_until
from scripted import Scripted
from templates import TOOLS

LS = {
    "type": "function",
    "function": {"name": "ls", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
ASK = {"role": "user", "content": "What is in /etc? " * 20}
REPLIES = {
    "text": "There is much in it.",
    "blanks": "There is much in it.\n\n",
    "reasoning": "<think>\nlet me see\n</think>\n\nThere is much in it.",
    "call": 'I look.\n<tool_call>{"name":"ls","arguments":{"path":"/etc"}}</tool_call>',
    "call as the template writes it": '<tool_call>\n{"name": "ls", "arguments": {"path": "/etc"}}\n</tool_call>',
}
ENGINE_THREAD = "headstart-engine"


@dataclass
class Work:
    """Texts that parsers read, by parser, and the threads that parsed and rendered."""

    parsed: dict[int, str] = field(default_factory=dict)
    parsers: list[Parser] = field(default_factory=list)  # kept, so that no two have the same id
    parsing: list[str] = field(default_factory=list)
    rendering: list[str] = field(default_factory=list)

    def clear(self) -> None:
        for found in (self.parsed, self.parsers, self.parsing, self.rendering):
            found.clear()  # type: ignore[attr-defined]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    found = Work()
    feed, render = Parser.feed, Template.render

    def counted_feed(self: Parser, text: str) -> Any:
        found.parsers.append(self)
        found.parsed[id(self)] = found.parsed.get(id(self), "") + text
        found.parsing.append(threading.current_thread().name)
        return feed(self, text)

    def counted_render(self: Template, *args: Any, **options: Any) -> str:
        found.rendering.append(threading.current_thread().name)
        return render(self, *args, **options)

    monkeypatch.setattr(Parser, "feed", counted_feed)
    monkeypatch.setattr(Template, "render", counted_render)
    return found


Ask = Callable[[str], object]


@contextmanager
def over_http(runtime: Runtime, *, stream: bool) -> Iterator[Ask]:
    with serving(runtime, model_id="fake") as server:

        def ask(text: str) -> None:
            body = {"model": "fake", "messages": [{"role": "user", "content": text}], "tools": [LS], "stream": stream}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).status_code == 200

        yield ask


@contextmanager
def in_process(runtime: Runtime) -> Iterator[Ask]:
    hs = Headstart(runtime)
    yield lambda text: hs.chat(text, tools=[LS])


CALLERS: dict[str, Callable[[Runtime], AbstractContextManager[Ask]]] = {
    "HTTP": partial(over_http, stream=False),
    "HTTP stream": partial(over_http, stream=True),
    "library": in_process,
}


@pytest.mark.parametrize(
    ("caller", "reply", "reuse"),
    [  # by default each caller, each reply and each mode with some of the others
        pytest.param(caller, reply, reuse, marks=[pytest.mark.slow] if (one + two + three) % 3 else [])
        for one, caller in enumerate(CALLERS)
        for two, reply in enumerate(REPLIES)
        for three, reuse in enumerate(("fast", "exact"))
    ],
)
def test_a_reply_is_parsed_once_and_its_turn_is_rendered_twice(work: Work, caller: str, reply: str, reuse: str) -> None:
    engine = Scripted(FakeEngine(slots=1, ctx=4096, tokenizer=FakeTokenizer(chat_template=TOOLS)))
    with Runtime(lambda: engine, Settings(memory_budget=32 << 20, reuse=reuse)) as runtime, CALLERS[caller](runtime) as ask:  # type: ignore[arg-type]
        engine.say(REPLIES[reply], REPLIES[reply])
        ask("Is it you? " * 20)  # what is found out about a template once is found out now
        wait_until(lambda: runtime.scheduler.idle)
        work.clear()
        ask("What is in /etc? " * 20)
        wait_until(lambda: runtime.scheduler.idle)
        assert runtime.scheduler.settle.counters["turns"] == 2, "settling is part of the cost"
    assert ENGINE_THREAD not in {*work.parsing, *work.rendering}
    assert len(work.rendering) == 2, "the prompt, and the turn with its reply"
    texts = [*work.parsed.values()]
    assert texts.count(REPLIES[reply]) == 1
    # In fast mode, what the template writes for the reply is compared with it where the texts differ.
    assert len(texts) <= (2 if reuse == "fast" else 1)


def test_the_thread_that_computes_has_the_name_that_these_tests_look_for() -> None:
    with Runtime(FakeEngine) as runtime:
        assert ENGINE_THREAD in [thread.name for thread in threading.enumerate()]
        assert runtime.scheduler.idle
