"""How much of a sequence another one has too."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headstart.explain.overlap import characters, overlap

ITEMS = st.lists(st.integers(0, 2), max_size=40)


def counted(ours: list[int], theirs: list[int], run: int) -> list[bool]:
    """The same by counting each run."""
    left = Counter(tuple(theirs[at : at + run]) for at in range(len(theirs) - run + 1))
    found = [False] * len(ours)
    for at in range(len(ours) - run + 1):
        if left[tuple(ours[at : at + run])]:
            left[tuple(ours[at : at + run])] -= 1
            found[at : at + run] = [True] * run
    return found


@given(ITEMS, ITEMS, st.integers(1, 9))
def test_as_counted_run_by_run(ours: list[int], theirs: list[int], run: int) -> None:
    assert overlap(np.array(ours, np.int32), np.array(theirs, np.int32), run).tolist() == counted(ours, theirs, run)


def test_a_text_that_has_moved_is_had_and_one_that_is_quoted_is_new() -> None:
    def kept(ours: str, theirs: str) -> str:
        return "".join(one for one, had in zip(ours, overlap(characters(ours), characters(theirs), 5), strict=True) if had)

    assert kept("SECOND, first!", "first! SECOND,") == "SECOND,first!"
    assert kept("first. first.", "first.") == "first."
    assert kept("firs", "first") == ""
    assert kept("\ud800 lone surrogate", "a \ud800 lone one") == "\ud800 lone "
