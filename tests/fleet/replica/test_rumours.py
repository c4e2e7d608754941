"""Rumours are bounded. `test_journal` has the rest."""

from __future__ import annotations

from headstart.fleet.replica.held import HeldKeys, by_tier
from headstart.fleet.replica.rumours import Rumours
from headstart.fleet.router.reports import RUMOUR, Tier


def test_the_oldest_is_withdrawn_if_there_are_too_many() -> None:
    held = HeldKeys()
    rumours = Rumours(held, most=3)
    for number in range(5):
        rumours.add(bytes([number]), number, float(number))
    rumours.add(bytes([2]), 2, 5.0)
    rumours.add(bytes([9]), 9, 6.0)
    held.drain()
    assert sorted(by_tier(held.drained())[Tier.SHARED]) == [2, 4, 9]
    rumours.expire(4.5 + RUMOUR)
    held.drain()
    assert sorted(by_tier(held.drained())[Tier.SHARED]) == [2, 9]
