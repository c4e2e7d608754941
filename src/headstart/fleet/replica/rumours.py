"""Rumours: what a replica has written to the shared tier, or read there, in the last hour."""

from __future__ import annotations

from headstart.fleet.replica.held import HeldKeys
from headstart.fleet.router.reports import RUMOUR, BlockKey, Tier
from headstart.interfaces.tokens import BlockId

MOST = 1 << 17
"""Most rumours. The oldest are withdrawn first."""


class Rumours:
    """Objects of the shared tier, kept as `Tier.SHARED` of some held keys. Not thread-safe."""

    def __init__(self, held: HeldKeys, most: int = MOST) -> None:
        self._held = held
        self._most = most
        self._known: dict[BlockId, tuple[BlockKey, float]] = {}  # by their id in the store, the oldest first

    def add(self, key: BlockId, block: BlockKey, now: float) -> None:
        """An object is there. `block`: what it is to the router."""
        self._known.pop(key, None)
        self._known[key] = block, now
        self._held.add(block, Tier.SHARED)
        if len(self._known) > self._most:
            self.withdraw(next(iter(self._known)))

    def withdraw(self, key: BlockId) -> None:
        """An object is not there. It may be unknown."""
        known = self._known.pop(key, None)
        if known is not None:
            self._held.remove(known[0], Tier.SHARED)

    def expire(self, now: float) -> None:
        """Withdraws what was not confirmed for an hour."""
        while self._known:
            key, (_, since) = next(iter(self._known.items()))
            if since > now - RUMOUR:
                return
            self.withdraw(key)
