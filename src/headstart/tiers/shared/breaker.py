"""Circuit breaker: keeps requests away from a store that fails. Pure: the caller passes the time.

    closed ──3 failures in a row, or `trip`──▶ open for 1, 2, 4 … 60 s ──▶ half open: one call tries ──success──▶ closed
                                                 ▲                                    │
                                                 └───────────── failure ──────────────┘

Each wait is shortened by a random part (*jitter*), so that the servers of a fleet do not come back at the same moment.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Final

FAILURES: Final = 3
"""Failures in a row that open it."""
FIRST, MOST = 1.0, 60.0
"""Seconds for which it stays open, at first and at most."""
JITTER = 0.5
"""Most of a wait that is left out."""
TRIAL = 10.0
"""Seconds after which a call that tries counts as lost, and another one may try."""


class Breaker:
    """Whether a store may be called. Thread-safe. `now` is a clock's time in seconds that never goes back.

    Args:
        chance: random numbers from 0 to 1; None for those of `random`.
    """

    def __init__(self, chance: Callable[[], float] | None = None) -> None:
        self._chance = random.random if chance is None else chance
        self._lock = threading.Lock()
        self._failures = 0
        self._wait = 0.0  # the last wait, without jitter; 0 if closed
        self._until = 0.0
        self._trying = False
        self._heard = False  # whether a call has ended

    @property
    def closed(self) -> bool:
        """Whether all calls are allowed."""
        return not self._wait

    def allows(self, now: float) -> bool:
        """Whether a call may be made now. If it was open, this call is the one that tries: report how it ends."""
        with self._lock:
            if not self._wait:
                return True
            if now < self._until:
                return False
            self._trying, self._until = True, now + TRIAL
            return True

    def seconds(self, now: float) -> float:
        """Seconds until a call may be made."""
        with self._lock:
            return max(0.0, self._until - now) if self._wait else 0.0

    def succeeded(self) -> None:
        """The store answered. A late answer to a call from before it opened counts too: the store is back."""
        with self._lock:
            self._failures, self._wait = 0, 0.0
            self._heard = True

    def failed(self, now: float) -> bool:
        """A call failed. Calls that began before it opened, and fail later, do not open it for longer.

        Returns whether that is news: it opens, or this was the first call of all, as if the store's address were wrong.
        """
        with self._lock:
            self._failures += 1
            first, self._heard = not self._heard, True
            opens = self._trying if self._wait else self._failures >= FAILURES
            if opens:
                self._open(now)
            return opens or first

    def trip(self, now: float) -> bool:
        """Opens it at once: the store hangs, and waiting for more failures would cost more. Returns whether it was closed."""
        with self._lock:
            opens = not self._wait
            if opens:
                self._open(now)
            return opens

    def _open(self, now: float) -> None:
        self._trying = False
        self._wait = min(MOST, 2 * self._wait or FIRST)
        self._until = now + self._wait * (1 - JITTER * self._chance())
