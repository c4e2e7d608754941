"""Quota: how much of a tier one owner may keep when others need room.

An *owner* is a tenant, or one user of it; the first bytes of a chain's root name its owner (`blocks.root_id`). As long as a
tier has room, nobody is limited. When it is full, entries of owners above the quota are evicted first. An owner that would
exceed the quota with a new entry evicts its own entries, never those of others.

Example: two owners share a tier of 4 GiB with a quota of half. One floods the tier. It can fill the tier while the other needs
nothing, but the other can always get up to 2 GiB of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

OWNER = 8
"""Bytes that name an owner."""


def owner_of(root: bytes) -> bytes:
    """The owner of a root's chains."""
    return root[:OWNER]


class OwnerLimits(Protocol):
    """Counts how much each owner holds, and says who holds too much."""

    @property
    def on(self) -> bool:
        """Whether owners matter at all."""

    def hold(self, owner: bytes, size: int) -> None:
        """Adds `size` bytes to an owner; a negative size subtracts."""

    def held(self, owner: bytes) -> int:
        """Bytes that an owner holds; 0 where nothing is counted."""

    def over(self, owner: bytes = b"", size: int = 0) -> Collection[bytes]:
        """The owners above the quota, including `owner` if `size` more bytes would bring it there."""


class NoQuota:
    """Limits nobody."""

    on = False

    def hold(self, owner: bytes, size: int) -> None:
        pass

    def held(self, owner: bytes) -> int:
        return 0

    def over(self, owner: bytes = b"", size: int = 0) -> Collection[bytes]:
        return ()


class Quota:
    """The same limit for each owner.

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


PIN_SHARE = 0.5
"""Largest share of a tier, and of an owner's quota, that may be pinned. The rest is for those who pin nothing."""


@dataclass(frozen=True, slots=True)
class PinLimits:
    """Bytes that may be pinned in a tier: of all owners together, and of one owner."""

    total: int
    owner: int

    @classmethod
    def of(cls, portion: float, budget: int, reserved: int) -> PinLimits:
        """The limits of a tier. `portion`: see `quota`. `reserved`: bytes of the budget that entries never get."""
        usable = max(0, budget - reserved)
        return cls(int(PIN_SHARE * usable), int(PIN_SHARE * min(usable, most_of(portion, budget))))

    def fits(self, owner: int, total: int) -> bool:
        """Whether one owner, and all together, may pin so much."""
        return owner <= self.owner and total <= self.total


def quota(portion: float, budget: int) -> OwnerLimits:
    """The quota of a tier. `portion`: a share of the budget up to 1, or bytes if larger. The whole budget means no quota."""
    most = most_of(portion, budget)
    return Quota(most) if most < budget else NoQuota()


def most_of(portion: float, budget: int) -> int:
    """The bytes that `portion` of a budget means."""
    return int(portion * budget if portion <= 1 else portion)
