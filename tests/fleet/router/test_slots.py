"""Waiting for a slot."""

from __future__ import annotations

import pytest

from headstart.fleet.router.slots import SlotTimes, slot_wait


def test_the_wait_for_a_slot_is_steep() -> None:
    assert slot_wait(0.0, 8) == 0.0
    assert slot_wait(0.5, 64) < 1e-4 < slot_wait(0.9, 64) < slot_wait(1.0, 64) == slot_wait(3.0, 64)
    assert slot_wait(0.8, 1) == pytest.approx(0.5 / 0.5), "with one slot: M/M/1, cut off at half"


def test_who_waits_for_a_slot_waits_for_those_before_it() -> None:
    times = SlotTimes(4)
    assert times.hold(10, 0) == times.crowd(10) == 0.0, "nothing is known yet"
    for _ in range(100):
        times.ended(8.0)
    assert times.held == pytest.approx(8.0, rel=1e-3)
    assert times.hold(0, 1) == 0.0
    assert [times.hold(waiting, 0) for waiting in range(3)] == pytest.approx([2.0, 4.0, 6.0], rel=1e-3)
    assert times.crowd(4) == pytest.approx(slot_wait(1.0, 4) * 8.0, rel=1e-3)
