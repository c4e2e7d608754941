"""How much of a sequence another one has too."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headstart.explain.overlap import characters, overlap

ITEMS = st.lists(st.integers(0, 2), max_size=40)


def counted(current: list[int], previous: list[int], run: int) -> list[bool]:
    """The same by counting each run."""
    left = Counter(tuple(previous[at : at + run]) for at in range(len(previous) - run + 1))
    found = [False] * len(current)
    for at in range(len(current) - run + 1):
        if left[tuple(current[at : at + run])]:
            left[tuple(current[at : at + run])] -= 1
            found[at : at + run] = [True] * run
    return found


@given(ITEMS, ITEMS, st.integers(1, 9))
def test_as_counted_run_by_run(current: list[int], previous: list[int], run: int) -> None:
    assert overlap(np.array(current, np.int32), np.array(previous, np.int32), run).tolist() == counted(current, previous, run)


def test_a_text_that_has_moved_is_had_and_one_that_is_quoted_is_new() -> None:
    def kept(current: str, previous: str) -> str:
        marked = overlap(characters(current), characters(previous), 5)
        return "".join(one for one, had in zip(current, marked, strict=True) if had)

    assert kept("SECOND, first!", "first! SECOND,") == "SECOND,first!"
    assert kept("first. first.", "first.") == "first."
    assert kept("firs", "first") == ""
    assert kept("\ud800 lone surrogate", "a \ud800 lone one") == "\ud800 lone "
