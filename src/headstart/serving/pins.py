"""Pins: entries that are not evicted, because their owner said so. Used from the engine thread only.

With a disk, the disk's catalogue keeps the pins, so they outlive the process, and `headstart cache pin` sets them too. A pinned
entry that the disk does not have yet, or can never have (an open tail), must fit into the memory's share for pins. Beyond that
share, memory may evict a pinned entry that is on disk.

What the disk loses by a fault loses its pin there too. It gets it back if this process stores it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from headstart.interfaces.tier import KV, STATE
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.quota import PinLimits
from headstart.tiers.disk_tier import DiskTier
from headstart.tiers.memory import Memory


class Pins:
    """The pins of memory, and what is known of those on disk. Other threads may ask what it contains.

    Args:
        limits: of memory.
        tell: called with entries that were pinned, or are not pinned any more.
    """

    def __init__(
        self,
        index: Index,
        memory: Memory,
        retention: Retention,
        disk: DiskTier,
        limits: PinLimits,
        tell: Callable[[Collection[BlockId]], object],
    ) -> None:
        self._index = index
        self._memory = memory
        self._retention = retention
        self._disk = disk
        self._limits = limits
        self._tell = tell
        self._here: set[BlockId] = set()  # pinned in this process; the disk has not confirmed it
        self._on_disk: Collection[BlockId] = frozenset()
        self._lost: dict[BlockId, BlockId] = {}  # what was pinned on disk until a fault took it, with its parents
        self._held: Counter[bytes] = Counter()  # bytes of memory by owner

    def __contains__(self, key: BlockId) -> bool:
        return key in self._here or key in self._on_disk

    def __len__(self) -> int:
        return len(self._here | {*self._on_disk})

    @property
    def held(self) -> int:
        """Bytes of memory that are pinned."""
        return self._held.total()

    def pin(self, entries: Sequence[Entry]) -> set[BlockId] | None:
        """Pins entries in memory. Returns those that were not pinned before.

        None if those that only memory has do not fit; then nothing is pinned.
        """
        only = [entry for entry in entries if self._disk.name not in entry.copies and not entry.pinned]
        need: Counter[bytes] = Counter()
        for entry in only:
            need[entry.owner] += self._size(entry)
        if not all(self._fits(owner, size, need.total()) for owner, size in need.items()):
            return None
        new = {entry.id for entry in entries if entry.id not in self}
        self._here |= new
        self._tell(new)
        for entry in (*only, *entries):
            self.came(entry)
        return new

    def unpin(self, keys: Iterable[BlockId]) -> None:
        """Removes the pins of entries."""
        gone = {*keys}
        for key in gone & self._lost.keys():
            del self._lost[key]
        self._here -= gone
        self._on_disk = frozenset(self._on_disk) - gone
        self._release(gone)
        self._tell(gone)

    def found(self, keys: Collection[BlockId]) -> None:
        """These entries, and no others, are pinned on disk."""
        gone, self._on_disk = {*self._on_disk} - {*keys}, keys
        self._here -= {*keys}
        self._release(gone - self._here)
        self._tell(gone.symmetric_difference(keys))
        for key in self._lost.keys() & keys:
            del self._lost[key]
        for key in [key for key in self._lost if self._is_on_disk(key)]:  # somebody has unpinned it
            del self._lost[key]
        for key in keys:
            if (entry := self._index.get(key)) is not None:
                self.came(entry)

    def _is_on_disk(self, key: BlockId) -> bool:
        return (entry := self._index.get(key)) is not None and self._disk.name in entry.copies

    def stored(self, key: BlockId) -> bool:
        """The disk has stored an entry. Returns whether it has to be pinned there."""
        return key in self._here or key in self._lost

    def lost(self, entry: Entry) -> None:
        """A fault has taken an entry from the disk."""
        if entry.id in self._on_disk:
            self._lost[entry.id] = entry.parent

    def parent_of_lost(self, key: BlockId) -> BlockId | None:
        """The parent of an entry that a fault has taken; None for all others."""
        return self._lost.get(key)

    def came(self, entry: Entry) -> None:
        """An entry may have come into memory."""
        if entry.pinned or entry.id not in self or self._memory.name not in entry.copies:
            return
        size = self._size(entry)
        if self._fits(entry.owner, size, size):
            entry.pinned = True
            self._held[entry.owner] += size
            self._retention.keep(entry)

    def left(self, entry: Entry) -> None:
        """An entry leaves memory, because it is erased or pinned on disk too; or nothing has it any more."""
        self._free(entry)
        self._here.discard(entry.id)

    def check(self) -> None:
        """Raises AssertionError if pins, index and memory disagree."""
        kept = [entry for entry in self._index if entry.pinned]
        assert all(entry.id in self and self._memory.name in entry.copies for entry in kept)
        assert self.held == sum(map(self._size, kept))
        assert all(self._index.get(key) is not None for key in self._here)

    def _release(self, keys: Iterable[BlockId]) -> None:
        for key in keys:
            if (entry := self._index.get(key)) is not None and entry.pinned:
                self._free(entry)
                self._retention.release(entry)

    def _free(self, entry: Entry) -> None:
        if entry.pinned:
            entry.pinned = False
            self._held[entry.owner] -= self._size(entry)
            if not self._held[entry.owner]:
                del self._held[entry.owner]

    def _fits(self, owner: bytes, size: int, total: int) -> bool:
        return self._limits.fits(self._held[owner] + size, self.held + total)

    def _size(self, entry: Entry) -> int:
        return self._memory.size(STATE if entry.state else KV)
