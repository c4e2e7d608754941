"""Where two prompts part, and which part of the request that is."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.explain.diff import WINDOW, Difference, difference
from headstart.explain.record import Record
from headstart.prompt.builder import Prompt, Prompter
from headstart.prompt.chat_template import Template
from headstart.testing.fake_engine import CHATML, FakeTokenizer
from talks import talk

PROMPTER = Prompter(FakeTokenizer(), Template(CHATML, {}))
TEXT = st.text("ab\n", max_size=60)


def record(prompt: Prompt, reply: str = "", **options: Any) -> Record:
    return Record(b"", prompt.text + reply, prompt.tokens, reply=reply, source=prompt.source, **options)


def chat(*contents: str, prompter: Prompter = PROMPTER) -> Prompt:
    roles = ("system", "user", "assistant", "user")
    return prompter.chat(talk([{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]))


def parting(current: Prompt, previous: Prompt) -> Difference:
    found = difference(current, record(previous))
    assert found is not None
    return found


@given(TEXT, TEXT)
def test_first_difference_of_any_two_texts(current: str, previous: str) -> None:
    tokens = PROMPTER.text("x").tokens
    found = difference(Prompt(current, tokens), record(Prompt(previous, tokens)))
    differ = [at for at, (a, b) in enumerate(zip(current, previous, strict=False)) if a != b]
    if not differ:
        assert found is None, "it only continues or shortens the other"
        return
    assert found is not None
    at = differ[0]
    assert (found.character, found.message) == (at, None)
    assert (found.current, found.previous) == (current[at:][:WINDOW], previous[at:][:WINDOW])
    assert (current[:at].endswith(found.before), len(found.before)) == (True, min(at, 20))


def test_difference_is_placed_in_its_message() -> None:
    earlier = chat("Be brief.", "What is the date? It is Monday.", "Noted.", "Thanks")
    found = parting(chat("Be brief.", "What is the date? It is Tuesday.", "Noted.", "Thanks"), earlier)
    assert (found.where, found.message, found.character) == ("messages", 1, len("What is the date? It is "))
    assert found.before == "at is the date? It is "[-20:]
    assert re.match("Tuesday", found.current)
    assert re.match("Monday", found.previous)
    assert len(found.current) == len(found.previous) == WINDOW


@pytest.mark.parametrize("template", [CHATML, CHATML.replace("message['content'] or ''", "(message['content'] or '') | trim")])
def test_blanks_before_a_message_count(template: str) -> None:
    prompter = Prompter(FakeTokenizer(), Template(template, {}))
    current, previous = (prompter.chat(talk([{"role": "user", "content": f"  hello {who}"}])) for who in ("world", "there"))
    found = parting(current, previous)
    assert (found.message, found.character) == (0, 8)


def test_messages_are_counted_as_they_were_sent_also_where_some_were_dropped() -> None:
    prompter = Prompter(FakeTokenizer(), Template(CHATML, {}))
    chat = [{"role": "user" if number % 2 == 0 else "assistant", "content": f"{number} " * 20} for number in range(9)]
    prompt = prompter.truncated_chat(talk(chat), 400)
    assert prompt.dropped
    changed = [*chat[:-1], {"role": "user", "content": "8 8 9"}]
    found = parting(prompt, prompter.truncated_chat(talk(changed), 400))
    assert (found.message, found.character) == (8, 4)


def test_difference_in_the_system_prompt() -> None:
    found = parting(chat("Be very brief.", "Hello"), chat("Be brief.", "Hello"))
    assert (found.where, found.message, found.character) == ("system", 0, 3)


def test_continuation_is_no_difference() -> None:
    earlier = chat("Be brief.", "Hello")
    assert difference(chat("Be brief.", "Hello", "Hi!", "And now?"), record(earlier, "Hi!")) is None
    assert difference(earlier, record(earlier)) is None
