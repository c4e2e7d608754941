"""Held keys: in which tiers a replica holds each key, and what has changed since the last report."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headstart.fleet.router.reports import BlockKey, Tier, TierKeys


class HeldKeys:
    """Keys with their tiers. A change costs the same however many keys there are. Not thread-safe."""

    def __init__(self) -> None:
        self._tiers: dict[BlockKey, int] = {}  # sums of ``1 << tier``
        self._before: dict[BlockKey, int] = {}  # the same of changed keys, at the last `drain`

    def __len__(self) -> int:
        return len(self._tiers)

    def add(self, key: BlockKey, tier: Tier) -> None:
        held = self._tiers.get(key, 0)
        self._set(key, held, held | 1 << tier)

    def remove(self, key: BlockKey, tier: Tier) -> None:
        """Does nothing if the key is not there."""
        held = self._tiers.get(key, 0)
        self._set(key, held, held & ~(1 << tier))

    def _set(self, key: BlockKey, held: int, tiers: int) -> None:
        if tiers == held:
            return
        self._before.setdefault(key, held)
        if tiers:
            self._tiers[key] = tiers
        else:
            del self._tiers[key]

    def drain(self) -> tuple[TierKeys, TierKeys]:
        """What was removed and what was added since the last call, by tier."""
        before, self._before = self._before, {}
        alike: dict[tuple[int, int], list[BlockKey]] = {}
        for key, old in before.items():
            alike.setdefault((old, self._tiers.get(key, 0)), []).append(key)
        removed: dict[Tier, list[BlockKey]] = {}
        added: dict[Tier, list[BlockKey]] = {}
        for (old, new), keys in alike.items():
            for changed, into in ((old & ~new, removed), (new & ~old, added)):
                for tier in Tier:
                    if changed >> tier & 1:
                        into.setdefault(tier, []).extend(keys)
        return removed, added

    def drained(self) -> dict[BlockKey, int]:
        """All keys with their tiers as they were at the last `drain`, for `by_tier`."""
        held = self._tiers.copy()
        for key, old in self._before.items():
            if old:
                held[key] = old
            else:
                held.pop(key, None)
        return held


def by_tier(held: Mapping[BlockKey, int]) -> TierKeys:
    """The keys of each tier, from sums of ``1 << tier``."""
    keys = np.fromiter(held.keys(), np.uint64, len(held))
    tiers = np.fromiter(held.values(), np.uint8, len(held))
    found = {tier: keys[tiers >> tier & 1 == 1].tolist() for tier in Tier}
    return {tier: some for tier, some in found.items() if some}
