"""The number of replicas for the prefill that waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.fleet.cluster.scaling import replicas_for


@pytest.mark.parametrize(
    ("waiting", "current", "wanted"),
    [(0, 2, 2), (9, 2, 2), (11, 2, 3), (40, 2, 8), (400, 2, 8), (0, 5, 4), (4.9, 5, 4), (6, 5, 5), (25, 5, 5), (26, 5, 6)],
)
def test_replicas_follow_the_seconds_that_wait(waiting: float, current: int, wanted: int) -> None:
    assert replicas_for(waiting, current, 2, 8, wait=5.0) == wanted


@given(st.floats(0, 1e6), st.integers(1, 50), st.integers(1, 50), st.integers(0, 50))
def test_the_number_stays_in_its_range_and_shrinks_by_one(waiting: float, current: int, least: int, more: int) -> None:
    found = replicas_for(waiting, current, least, least + more)
    assert least <= found <= least + more
    if least <= current <= least + more:
        assert found >= current - 1


@given(st.floats(0, 1e4), st.integers(1, 50))
def test_it_does_not_swing(waiting: float, current: int) -> None:
    """With the same wait, the number that was chosen is kept or comes nearer to a number that is kept."""
    first = replicas_for(waiting, current, 1, 10_000)
    second = replicas_for(waiting, first, 1, 10_000)
    assert second == first or (second < first <= current)
