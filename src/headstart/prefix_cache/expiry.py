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
from collections import Counter
from collections.abc import Mapping
from itertools import islice

LOOKS = 20
"""Searches during the shortest term."""
LONGEST_REQUEST = 86_400.0
"""Seconds for which a request may go on writing after it came."""
AT_ONCE = 256
"""Owners of which one call asks whether their terms can be forgotten."""
NOTED = 0.5
"""Parts of a term after which a further request of its owner is noted."""


def outlived(seconds: float, given: float) -> float:
    """The time from which nothing of an owner with a term of `seconds` can be left. `given`: its last request that was noted.

    Its latest request came at most `NOTED` terms after that one. All that it wrote was erased one term after it was written.
    """
    return given + LONGEST_REQUEST + 2 * seconds


class Terms:
    """The terms of all owners, in seconds. Thread-safe. A request of an owner costs the same, however many have terms.

    Args:
        most: the term for everybody.

    Attributes:
        shortest: the shortest of all terms.
        version: number of changes so far that make a search due at once. A new owner's term makes none, unless it is the
            shortest: what the owner has stored earlier is found by the next search.
        before: everything written up to this time must be dropped in this process, because somebody has deleted all of it.
        obeyed: the latest such request; `before` is smaller if the clock was set back since.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = self.shortest = most
        self.version = 0
        self.before = self.obeyed = -math.inf
        self._lock = threading.Lock()
        self._owners: dict[bytes, float] = {}
        self._lengths: Counter[float] = Counter()  # how many owners have a term; there are few different ones
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

    @property
    def owners(self) -> dict[bytes, float]:
        """A copy of the terms of single owners, by `quota.owner_of`."""
        with self._lock:
            return dict(self._owners)

    def __contains__(self, owner: bytes) -> bool:
        """Whether an owner has a term of its own."""
        return owner in self._owners

    def cap(self, seconds: float) -> None:
        """Limits every term."""
        with self._lock:
            if seconds < self._most:
                self._most = seconds
                self.shortest = self._least()
                self.version += 1

    def give(self, owner: bytes, seconds: float | None, now: float) -> None:
        """Sets an owner's own term, at each request of the owner; None removes it."""
        with self._lock:
            changed = self._owners.get(owner) != seconds
            if changed or (seconds is not None and abs(now - self._given.get(owner, -math.inf)) > NOTED * seconds):
                self._news[owner] = seconds
                self._given[owner] = now
            if changed:
                self._set({owner: seconds})

    def share(self) -> None:
        """Says that a folder keeps the terms too, so that `learn` removes what can be forgotten."""
        self._in_folder = True

    def forget(self, now: float) -> None:
        """Forgets terms of owners that can have nothing left, unless a folder keeps them. It looks at the next `AT_ONCE`."""
        with self._lock:
            if self._in_folder:
                return
            for owner in list(islice(self._given, AT_ONCE)):
                given = self._given.pop(owner)
                term = self._owners.get(owner)
                if term is not None and outlived(term, given) > now:
                    self._given[owner] = given  # behind all others
                else:
                    self._news.pop(owner, None)
                    self._set({owner: None})

    def news(self) -> dict[bytes, float | None]:
        """Terms that were set in this process and are not yet known to others; None for removed ones."""
        with self._lock:
            return dict(self._news)

    def kept(self, noted: Mapping[bytes, float | None]) -> None:
        """The folder has these `news`."""
        with self._lock:
            for owner, term in noted.items():
                if owner in self._news and self._news[owner] == term:
                    del self._news[owner]

    def learn(self, owners: Mapping[bytes, float]) -> None:
        """Sets the terms of all owners, as the folder has them. What it does not have yet stays."""
        with self._lock:
            gone = {owner: None for owner in self._owners if owner not in owners}
            self._set({**gone, **owners, **self._news})
            self._given = {owner: given for owner, given in self._given.items() if owner in self._owners}

    def _set(self, terms: Mapping[bytes, float | None]) -> None:
        """Sets and removes (None) terms."""
        shorter = False
        for owner, term in terms.items():
            before = self._owners.pop(owner, None)
            if before is not None:
                self._lengths[before] -= 1
                if not self._lengths[before]:
                    del self._lengths[before]
            if term is not None:
                self._owners[owner] = term
                self._lengths[term] += 1
                shorter |= before is not None and term < before
        before, self.shortest = self.shortest, self._least()
        self.version += shorter or self.shortest < before

    def _least(self) -> float:
        return min((self._most, *self._lengths))

    def of(self, owner: bytes) -> float:
        """The term of an owner; for b"" (unknown owner) the shortest one."""
        return min(self._most, self._owners.get(owner, math.inf)) if owner else self.shortest

    def cut(self, owner: bytes, now: float) -> float:
        """The time up to which an owner's entries have expired, or expire before the next search but one."""
        term = self.of(owner)
        return now + 2 * self.look - term if term < math.inf else -math.inf

    def earliest_cut(self, owner: bytes, now: float) -> float:
        """The greatest `cut` for the owner's present term: searches are rarest if no term is shorter."""
        term = self.of(owner)
        return now - term * (1 - 2 / LOOKS) if term < math.inf else -math.inf

    def ends(self, owner: bytes, written: float) -> float:
        """When an entry of an owner must be dropped, if nobody deletes it before; infinite for never."""
        return written - self.cut(owner, 0.0)

    def due(self, owner: bytes, now: float) -> float:
        """The time up to which an owner's entries must be dropped in this process."""
        return max(self.before, self.cut(owner, now))

