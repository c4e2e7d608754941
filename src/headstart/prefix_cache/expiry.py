"""Terms: how long what was written may be kept, by whose it is. Times are seconds since 1970.

What is looked through now and then is rid of what would be due before the next look but one: so nothing is kept longer than its
term, also if one look fails, but a little less long.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

LOOKS = 20
"""Looks in the shortest term."""


class Terms:
    """How many seconds may pass since something was written. Thread-safe.

    Args:
        most: for everybody.

    Attributes:
        shortest: the shortest term of all.
        owners: by `prefix_cache/quota.owner_of`, those who have a term of their own.
        version: how often any term has changed.
        before: whatever was written by then has to go from this process, as somebody has deleted all of it.
        obeyed: what somebody said there last; `before` is less once the clock has been set back.
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
        """Seconds between two looks."""
        return self.shortest / LOOKS

    def cap(self, seconds: float) -> None:
        """Nobody's term is longer."""
        with self._lock:
            if seconds < self._most:
                self._most = seconds
                self._change(self.owners)

    def give(self, owner: bytes, seconds: float | None) -> None:
        """An owner's own term; None for that of everybody."""
        with self._lock:
            if self.owners.get(owner) != seconds:
                self._news[owner] = seconds
                self._change(_with(self.owners, {owner: seconds}))

    def news(self) -> Mapping[bytes, float | None]:
        """What was given here, and not yet learned by others."""
        with self._lock:
            return dict(self._news)

    def learn(self, owners: Mapping[bytes, float], said: Mapping[bytes, float | None]) -> None:
        """These owners have terms, and no others, as far as was not given otherwise since this of the `news` was `said`."""
        with self._lock:
            self._news = {owner: term for owner, term in self._news.items() if owner not in said or said[owner] != term}
            if (known := _with(owners, self._news)) != self.owners:
                self._change(known)

    def _change(self, owners: Mapping[bytes, float]) -> None:
        self.owners, self.shortest = owners, min(self._most, *owners.values(), math.inf)
        self.version += 1

    def of(self, owner: bytes) -> float:
        """The term of what is an owner's; b"" for what may be anybody's."""
        return min(self._most, self.owners.get(owner, math.inf)) if owner else self.shortest

    def cut(self, owner: bytes, now: float) -> float:
        """What an owner has written by then has been kept for long enough."""
        term = self.of(owner)
        return now + 2 * self.look - term if term < math.inf else -math.inf

    def due(self, owner: bytes, now: float) -> float:
        """What an owner has written by then has to go from this process."""
        return max(self.before, self.cut(owner, now))


def _with(owners: Mapping[bytes, float], news: Mapping[bytes, float | None]) -> dict[bytes, float]:
    return {owner: term for owner, term in {**owners, **news}.items() if term is not None}
