"""Slots: what the number of requests at a replica means for the time until a slot is free."""

from __future__ import annotations

import math

_SMOOTH = 0.1


class SlotTimes:
    """How long requests hold a slot, and what follows for those that wait for one.

    Attributes:
        held: mean seconds that a request holds its slot, smoothed; 0 before the first one.
    """

    def __init__(self, slots: int) -> None:
        self.held = 0.0
        self._slots = slots

    def ended(self, seconds: float) -> None:
        """A request has held its slot for so long."""
        self.held += _SMOOTH * (seconds - self.held)

    def hold(self, waiting: int, free: int) -> float:
        """Seconds until a slot is free for a new request, behind those that wait."""
        return max(0, waiting + 1 - free) * self.held / self._slots

    def crowd(self, ongoing: int) -> float:
        """Seconds for which later requests wait for a slot because of one more among so many."""
        return slot_wait(ongoing / self._slots, self._slots) * self.held


def slot_wait(busy: float, slots: int) -> float:
    """The mean wait for one of several slots, in times that a slot is held, if they are busy for this share of the time.

    Sakasegawa's approximation for random arrivals. It is steep: nothing while slots are free, much when nearly all are busy.
    """
    share = min(busy, 1.0 - 1.0 / (slots + 1))
    return float(share ** (math.sqrt(2.0 * (slots + 1)) - 1.0) / (slots * (1.0 - share)))
