"""Expiry: how long stored text may be kept (`--expire`). Times are seconds since 1970.

A *term* is the longest time for which anything may be kept after it was written. There is one term for everybody, and owners
may have shorter terms of their own. Tiers are searched for expired entries from time to time. Each search removes everything
that would expire before the search after the next one. So nothing is kept longer than its term, even if one search fails.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

LOOKS = 20
"""Searches during the shortest term."""


class Terms:
    """The terms of all owners, in seconds. Thread-safe.

    Args:
        most: the term for everybody.

    Attributes:
        shortest: the shortest of all terms.
        owners: terms of single owners, by `quota.owner_of`.
        version: number of changes so far.
        before: everything written up to this time must be dropped in this process, because somebody has deleted all of it.
        obeyed: the latest such request; `before` is smaller if the clock was set back since.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = self.shortest = most
        self.owners: Mapping[bytes, float] = {}
        self.version = 0
        self.before = self.obeyed = -math.inf
        self._lock = threading.Lock()
        self._news: dict[bytes, float | None] = {}

    @property
    def look(self) -> float:
        """Seconds between two searches."""
        return self.shortest / LOOKS

    def cap(self, seconds: float) -> None:
        """Limits every term."""
        with self._lock:
            if seconds < self._most:
                self._most = seconds
                self._change(self.owners)

    def give(self, owner: bytes, seconds: float | None) -> None:
        """Sets an owner's own term; None removes it."""
        with self._lock:
            if self.owners.get(owner) != seconds:
                self._news[owner] = seconds
                self._change(_with(self.owners, {owner: seconds}))

    def news(self) -> Mapping[bytes, float | None]:
        """Terms that were set in this process and are not yet known to others; None for removed ones."""
        with self._lock:
            return dict(self._news)

    def learn(self, owners: Mapping[bytes, float], said: Mapping[bytes, float | None]) -> None:
        """Sets the terms of all owners, as the folder has them. `said`: the `news` that were written there; newer ones stay."""
        with self._lock:
            self._news = {owner: term for owner, term in self._news.items() if owner not in said or said[owner] != term}
            if (known := _with(owners, self._news)) != self.owners:
                self._change(known)

    def _change(self, owners: Mapping[bytes, float]) -> None:
        self.owners, self.shortest = owners, min(self._most, *owners.values(), math.inf)
        self.version += 1

    def of(self, owner: bytes) -> float:
        """The term of an owner; for b"" (unknown owner) the shortest one."""
        return min(self._most, self.owners.get(owner, math.inf)) if owner else self.shortest

    def cut(self, owner: bytes, now: float) -> float:
        """The time up to which an owner's entries have expired, or expire before the next search but one."""
        term = self.of(owner)
        return now + 2 * self.look - term if term < math.inf else -math.inf

    def due(self, owner: bytes, now: float) -> float:
        """The time up to which an owner's entries must be dropped in this process."""
        return max(self.before, self.cut(owner, now))


def _with(owners: Mapping[bytes, float], news: Mapping[bytes, float | None]) -> dict[bytes, float]:
    return {owner: term for owner, term in {**owners, **news}.items() if term is not None}
