"""Bars and plain text."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.cli.look import LOOKS, cells, plain


@given(st.dictionaries(st.sampled_from([*LOOKS, "attic"]), st.integers(0, 10**9)), st.integers(5, 80))
def test_bars_are_full_and_show_every_part(parts: dict[str, int], width: int) -> None:
    found = cells(parts, width)
    assert found.keys() == {name for name, size in parts.items() if size and name in LOOKS}
    assert sum(found.values()) == (width if found else 0)
    assert all(count >= 1 for count in found.values())
    assert [*found] == [name for name in LOOKS if name in found]


def test_bars_are_in_proportion() -> None:
    assert cells({"live": 50, "memory": 25, "computed": 25}, 20) == {"live": 10, "memory": 5, "computed": 5}
    assert cells({"live": 10_000, "computed": 1}, 20) == {"live": 19, "computed": 1}


def test_letters_differ() -> None:
    assert len({look.letter for look in LOOKS.values()}) == len(LOOKS)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, größer 日本", "plain text, größer 日本"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202egnp.exe\u200b", "\\u202egnp.exe\\u200b"),
        ("\ud800", "\\ud800"),
    ],
)
def test_nothing_is_left_that_a_terminal_obeys(text: str, shown: str) -> None:
    assert plain(text) == shown


@given(st.text(st.characters()))
def test_no_text_has_control_characters(text: str) -> None:
    assert not {"Cc", "Cf", "Cs", "Zl", "Zp"} & {unicodedata.category(char) for char in plain(text)}
