"""Stats: the totals are sums of what ended, and the steps are the totals over time, however long that is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headstart.observe.report import Summary
from headstart.observe.stats import FIRST, STEPS, Stats

WARM = Summary(100, 30, 50, 20, 11, {"memory": 40, "disk": 10}, "fast", None, True, 0, 0.0, 0.2, 0.25, 2.0)
COLD = replace(WARM, live=0, restored=0, tiers={}, computed=100, ttft=4.0)


def test_what_is_saved_is_unknown_as_long_as_the_speed_is() -> None:
    """A server that had just started again said that 90 cached tokens of 100 had saved 0.0 s."""
    stats = Stats(lambda: 0.0)
    assert stats.view()["saved_seconds"] == 0.0
    stats.record(WARM, None)
    assert stats.view()["saved_seconds"] is None
    stats.record(WARM, 1.5)
    assert stats.view()["saved_seconds"] == 1.5


def test_it_counts_what_ended() -> None:
    now = 0.0
    stats = Stats(lambda: now)
    stats.record(WARM, 3.5)
    stats.record(COLD, 0.0)
    now = 3 * FIRST
    stats.record(replace(WARM, ttft=0.75, completion=1, decode=0.0), 1.5)
    found = stats.view()
    sums = {"requests": 3, "prompt": 300, "cached": 160, "computed": 140, "completion": 23}
    assert {name: found[name] for name in sums} == sums
    assert found["tiers"] == {"live": 60, "memory": 80, "disk": 20}
    assert found["saved_seconds"] == 5.0
    assert found["ttft"] == {"warm": {"requests": 2, "median": 0.5}, "cold": {"requests": 1, "median": 4.0}}
    assert found["decode"] == 5.0, "a reply of one token has no speed"
    assert found["steps"] == {
        "seconds": FIRST,
        "requests": [2, 0, 0, 1],
        "cached": [80, 0, 0, 80],
        "computed": [120, 0, 0, 20],
        "saved_seconds": [3.5, 0, 0, 1.5],
        "warm": [0.25, None, None, 0.75],
        "cold": [4.0, None, None, None],
        "decode": [5.0, None, None, None],
    }


@pytest.mark.parametrize("gap", [1.0, 7.0, 4321.0, 1e7])
def test_the_steps_are_bounded_and_lose_nothing(gap: float) -> None:
    now = 0.0
    stats = Stats(lambda: now)
    for _ in range(500):
        stats.record(WARM, 1.0)
        now += gap
    steps = stats.view()["steps"]
    assert len(steps["requests"]) <= STEPS
    assert len(steps["requests"]) * steps["seconds"] > now >= (len(steps["requests"]) - 1) * steps["seconds"]
    assert sum(steps["requests"]) == sum(steps["saved_seconds"]) == 500
    assert sum(steps["cached"]) == 500 * WARM.cached
