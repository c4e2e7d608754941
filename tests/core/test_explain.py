from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.explain import WINDOW, diverge
from headstart.core.prompt import Prompt, Prompter
from headstart.core.template import Template
from headstart.engines.fake import CHATML, FakeTokenizer

PROMPTER = Prompter(FakeTokenizer(), Template(CHATML, {}))
TEXT = st.text("ab\n", max_size=60)


def chat(*contents: str) -> Prompt:
    roles = ("system", "user", "assistant", "user")
    return PROMPTER.chat([{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)])


@given(TEXT, TEXT)
def test_first_difference_of_any_two_texts(ours: str, theirs: str) -> None:
    found = diverge(Prompt(ours, PROMPTER.text("x").tokens), theirs)
    differ = [at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    if not differ:
        assert found is None, "it only continues or shortens the other"
        return
    assert found is not None
    assert found.character == differ[0]
    assert (found.ours, found.theirs) == (ours[differ[0] :][:WINDOW], theirs[differ[0] :][:WINDOW])


def test_difference_is_placed_in_its_message() -> None:
    earlier = chat("Be brief.", "What is the date? It is Monday.", "Noted.", "Thanks")
    found = diverge(chat("Be brief.", "What is the date? It is Tuesday.", "Noted.", "Thanks"), earlier.text)
    assert found is not None
    assert (found.message, found.character) == (1, len("What is the date? It is "))
    assert re.match("Tuesday", found.ours)
    assert re.match("Monday", found.theirs)
    assert len(found.ours) == len(found.theirs) == WINDOW


@pytest.mark.parametrize("template", [CHATML, CHATML.replace("message['content'] or ''", "(message['content'] or '') | trim")])
def test_blanks_before_a_message_count(template: str) -> None:
    ours = Prompter(FakeTokenizer(), Template(template, {})).chat([{"role": "user", "content": "  hello world"}])
    theirs = Prompter(FakeTokenizer(), Template(template, {})).chat([{"role": "user", "content": "  hello there"}])
    found = diverge(ours, theirs.text)
    assert found is not None
    assert (found.message, found.character) == (0, 8)


def test_messages_are_counted_as_they_were_sent_also_where_some_were_dropped() -> None:
    ours = Prompter(FakeTokenizer(), Template(CHATML, {}))
    chat = [{"role": "user" if number % 2 == 0 else "assistant", "content": f"{number} " * 20} for number in range(9)]
    prompt = ours.slide(chat, 400)
    assert prompt.dropped
    changed = [*chat[:-1], {"role": "user", "content": "8 8 9"}]
    found = diverge(prompt, ours.slide(changed, 400).text)
    assert found is not None
    assert (found.message, found.character) == (8, 4)


def test_difference_in_the_system_prompt() -> None:
    found = diverge(chat("Be very brief.", "Hello"), chat("Be brief.", "Hello").text)
    assert found is not None
    assert (found.message, found.character) == (0, 3)


def test_continuation_is_no_divergence() -> None:
    earlier = chat("Be brief.", "Hello")
    assert diverge(chat("Be brief.", "Hello", "Hi!", "And now?"), earlier.text + "Hi!") is None
    assert diverge(earlier, earlier.text) is None
