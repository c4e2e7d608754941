"""An expression for many texts matches as one with all of them, the longest first."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.longest_match import longest_of

TEXTS = st.lists(st.text("ab<|.[\\é\n", max_size=5), max_size=12)


@given(TEXTS, st.text("ab<|.[\\é\n", max_size=60))
@examples(300)
def test_it_matches_the_longest(texts: Sequence[str], text: str) -> None:
    flat = "|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True))) or "(?!)"
    assert re.findall(longest_of(texts), text) == re.findall(flat, text)


def test_what_texts_have_in_common_is_looked_for_once() -> None:
    """Fault: beside the 6,000 unused tokens of Gemma 3, each `<` of a prompt was compared with each of them."""
    assert longest_of(f"<unused{number}>" for number in range(6_000)).count("<unused") == 1
    assert longest_of(["<a>", "<a>b", "<"]) == "<(?:a>(?:b)?)?"
