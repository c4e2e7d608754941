"""Expiry: how long stored text may be kept (`--expire`). Times are seconds since 1970.

A *term* is the longest time for which anything may be kept after it was written. There is one term for everybody, and owners
may have shorter terms of their own. Tiers are searched for expired entries from time to time. Each search removes everything
that would expire before the search after the next one. So nothing is kept longer than its term, even if one search fails.

A user of a key with a term is an owner with that term, so there may be very many. An owner's term is forgotten when nothing
of the owner can be left: long after the owner's latest request (`outlived`), and only if no disk has anything of the owner.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

LOOKS = 20
"""Searches during the shortest term."""
LONGEST_REQUEST = 86_400.0
"""Seconds for which a request may go on writing after it came."""
NOTED = 0.5
"""Parts of a term after which a further request of its owner is noted."""


def outlived(seconds: float, given: float) -> float:
    """The time from which nothing of an owner with a term of `seconds` can be left. `given`: its last request that was noted.

    Its latest request came at most `NOTED` terms after that one. All that it wrote was erased one term after it was written.
    """
    return given + LONGEST_REQUEST + 2 * seconds


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
        self._given: dict[bytes, float] = {}  # when, in this process
        self._in_folder = False

    @property
    def most(self) -> float:
        """The term for everybody."""
        return self._most

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

    def give(self, owner: bytes, seconds: float | None, now: float) -> None:
        """Sets an owner's own term, at each request of the owner; None removes it."""
        with self._lock:
            changed = self.owners.get(owner) != seconds
            if changed or (seconds is not None and abs(now - self._given.get(owner, -math.inf)) > NOTED * seconds):
                self._news[owner] = seconds
                self._given[owner] = now
            if changed:
                self._change(_with(self.owners, {owner: seconds}))

    def share(self) -> None:
        """Says that a folder keeps the terms too, so that `learn` removes what can be forgotten."""
        self._in_folder = True

    def forget(self, now: float) -> None:
        """Forgets the terms of owners that can have nothing left, unless a folder keeps them."""
        with self._lock:
            if self._in_folder:
                return
            left = {owner: term for owner, term in self.owners.items() if outlived(term, self._given[owner]) > now}
            if len(left) < len(self.owners):
                self._news, self._given = {}, {owner: self._given[owner] for owner in left}
                self._set(left)

    def news(self) -> Mapping[bytes, float | None]:
        """Terms that were set in this process and are not yet known to others; None for removed ones."""
        with self._lock:
            return dict(self._news)

    def learn(self, owners: Mapping[bytes, float], noted: Mapping[bytes, float | None]) -> None:
        """Sets the terms of all owners, as the folder has them. `noted`: the `news` that it has; newer ones stay."""
        with self._lock:
            self._news = {owner: term for owner, term in self._news.items() if owner not in noted or noted[owner] != term}
            if (known := _with(owners, self._news)) != self.owners:
                self._change(known)
                self._given = {owner: given for owner, given in self._given.items() if owner in known}

    def _change(self, owners: Mapping[bytes, float]) -> None:
        self._set(owners)
        self.version += 1

    def _set(self, owners: Mapping[bytes, float]) -> None:
        self.owners, self.shortest = owners, min(self._most, *owners.values(), math.inf)

    def of(self, owner: bytes) -> float:
        """The term of an owner; for b"" (unknown owner) the shortest one."""
        return min(self._most, self.owners.get(owner, math.inf)) if owner else self.shortest

    def cut(self, owner: bytes, now: float) -> float:
        """The time up to which an owner's entries have expired, or expire before the next search but one."""
        term = self.of(owner)
        return now + 2 * self.look - term if term < math.inf else -math.inf

    def ends(self, owner: bytes, written: float) -> float:
        """When an entry of an owner must be dropped, if nobody deletes it before; infinite for never."""
        return written - self.cut(owner, 0.0)

    def due(self, owner: bytes, now: float) -> float:
        """The time up to which an owner's entries must be dropped in this process."""
        return max(self.before, self.cut(owner, now))


def _with(owners: Mapping[bytes, float], news: Mapping[bytes, float | None]) -> dict[bytes, float]:
    return {owner: term for owner, term in {**owners, **news}.items() if term is not None}
