from __future__ import annotations

import re

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


def test_difference_in_the_system_prompt() -> None:
    found = diverge(chat("Be very brief.", "Hello"), chat("Be brief.", "Hello").text)
    assert found is not None
    assert (found.message, found.character) == (0, 3)


def test_continuation_is_no_divergence() -> None:
    earlier = chat("Be brief.", "Hello")
    assert diverge(chat("Be brief.", "Hello", "Hi!", "And now?"), earlier.text + "Hi!") is None
    assert diverge(earlier, earlier.text) is None
