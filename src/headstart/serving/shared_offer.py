"""Shared offer: offers canonical entries of memory to the shared tier, when its kind of store wants them.

Used from the engine thread only. An offered entry is pinned until the tier has answered, because the tier reads its cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.index import Entry, Index
from headstart.tiers.disk import Label
from headstart.tiers.memory import Memory
from headstart.tiers.shared_tier import SharedTier

HEAD = 64
"""Blocks at the beginning of a chain that are touched: if the store evicted them, all after them would be lost with them."""


class SharedOffer:
    """Copies full blocks, and the checkpoints at their ends, from memory to the shared tier.

    Args:
        label: makes the description of an entry; its second argument says whether the entry is canonical.

    Attributes:
        reading: entries whose cells the tier may read.
    """

    def __init__(self, index: Index, memory: Memory, tier: SharedTier, label: Callable[[Entry, bool], Label]) -> None:
        self.reading: dict[BlockId, Entry] = {}
        self._index = index
        self._memory = memory
        self._tier = tier
        self._label = label

    def computed(self, entry: Entry) -> None:
        """An entry was computed here."""
        if self._may_leave(entry):
            self._tier.computed(self._memory.cell_bytes if not entry.state else self._memory.state_bytes)
        if "computed" in self._tier.saves:
            self._offer(entry)

    def reused(self, keys: Iterable[BlockId]) -> None:
        """A request uses these entries, parents before children."""
        if "reused" not in self._tier.saves:
            return
        entries = [entry for key in keys if (entry := self._index.get(key)) is not None and self._may_leave(entry)]
        for entry in entries:
            self._offer(entry)
        self._tier.touch([self._label(entry, True) for entry in entries[:HEAD] if self._tier.due(entry.id)])

    def leave(self) -> None:
        """The server stops: offers everything that only this server may have."""
        if "leaving" in self._tier.saves:
            for entry in sorted(self._index, key=lambda entry: (entry.start, entry.state)):  # a block before its checkpoint
                self._offer(entry, last=True)

    def _may_leave(self, entry: Entry) -> bool:
        """Whether it is a canonical block or checkpoint. Derived KV never leaves the machine."""
        return entry.canonical and len(entry.tokens) == self._index.block_size

    def _offer(self, entry: Entry, *, last: bool = False) -> None:
        here = self._tier.lacks(entry.id) and self._may_leave(entry) and entry.copies.get(self._memory.name) is True
        data = self._memory.read(entry.id) if here and entry.id not in self.reading else None
        if data is not None and self._tier.offer(self._label(entry, True), data, last=last):
            entry.pins += 1
            self.reading[entry.id] = entry

    def take_answers(self) -> bool:
        """Frees the entries that the tier has answered. Returns whether there were any."""
        keys = self._tier.answered()
        for key in keys:
            self.reading.pop(key).pins -= 1
        return bool(keys)
