"""Quota: how much of a tier one owner may hold once others want room.

An owner is whoever a chain belongs to; the first bytes of its root say who that is. As long as a tier has room nobody is
limited. When it is full, the pieces of those who hold more than the quota go first, and whoever would hold more with what
comes gives way itself, never others. So one who floods a tier leaves each other owner what it holds, up to the quota.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

OWNER = 8
"""Bytes of an owner."""


def owner_of(root: bytes) -> bytes:
    """The owner of the chains of a root."""
    return root[:OWNER]


class OwnerLimits(Protocol):
    """What says who holds too much of a tier."""

    @property
    def on(self) -> bool:
        """Whether owners matter at all."""

    def hold(self, owner: bytes, size: int) -> None:
        """An owner holds `size` bytes more; less if that is negative."""

    def held(self, owner: bytes) -> int:
        """Bytes that an owner holds, where that is counted."""

    def over(self, owner: bytes = b"", size: int = 0) -> Collection[bytes]:
        """Who holds more than the quota, or will if `size` bytes come for `owner`."""


class NoQuota:
    """An `OwnerLimits` that limits nobody."""

    on = False

    def hold(self, owner: bytes, size: int) -> None:
        pass

    def held(self, owner: bytes) -> int:
        return 0

    def over(self, owner: bytes = b"", size: int = 0) -> Collection[bytes]:
        return ()


class Quota:
    """An `OwnerLimits` that is the same for all owners.

    Args:
        most: bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[bytes, int] = {}
        self._over: frozenset[bytes] = frozenset()

    @property
    def on(self) -> bool:
        return True

    def hold(self, owner: bytes, size: int) -> None:
        now = self._held.get(owner, 0) + size
        if now:
            self._held[owner] = now
        else:
            self._held.pop(owner, None)
        if (now > self._most) != (owner in self._over):
            self._over ^= {owner}

    def held(self, owner: bytes) -> int:
        return self._held.get(owner, 0)

    def over(self, owner: bytes = b"", size: int = 0) -> Collection[bytes]:
        return self._over | {owner} if size and self.held(owner) + size > self._most else self._over


def quota(portion: float, budget: int) -> OwnerLimits:
    """The quota of a tier. `portion`: up to 1 a share of the budget, of which all is no quota; above that bytes."""
    most = most_of(portion, budget)
    return Quota(most) if most < budget else NoQuota()


def most_of(portion: float, budget: int) -> int:
    """What `portion` of a budget is, in bytes."""
    return int(portion * budget if portion <= 1 else portion)
