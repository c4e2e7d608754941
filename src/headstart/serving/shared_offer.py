"""Shared offer: offers canonical entries of memory to the shared tier, when its kind of store wants them.

Used from the engine thread only. An offered entry is held until the tier has answered, because the tier reads its cell. The
tier's queue is short, and a long prompt is saved at once. So entries for which there is no room wait for it, in their order,
and are not held meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from headstart.interfaces.tokens import BlockId, Bytes
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.tiers.disk import Label
from headstart.tiers.memory import Memory
from headstart.tiers.shared_tier import SharedTier

HEAD = 64
"""Blocks at the beginning of a chain that are touched: if the store evicted them, all after them would be lost with them."""
STEP = 128
"""Most waiting entries that are offered in one step of the engine thread. A store that fails refuses all of them at once."""
LATER = 1 << 16
"""Most entries that wait for room. Further ones are offered when they are used again, or when the server stops."""


class SharedOffer:
    """Copies full blocks, and the checkpoints at their ends, from memory to the shared tier.

    Args:
        label: makes the description of an entry; its second argument says whether the entry is canonical.
        usable: whether an entry may be used: not if it is being deleted, or its time is over.

    Attributes:
        reading: entries whose cells the tier may read.
    """

    def __init__(
        self,
        index: Index,
        memory: Memory,
        tier: SharedTier,
        label: Callable[[Entry, bool], Label],
        usable: Callable[[Entry], bool],
    ) -> None:
        self.reading: dict[BlockId, Entry] = {}
        self._later: dict[BlockId, None] = {}
        self._index = index
        self._memory = memory
        self._tier = tier
        self._label = label
        self._usable = usable

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
        return entry.canonical and entry.length == self._index.block_size

    @property
    def later(self) -> int:
        """The number of entries that wait for room."""
        return len(self._later)

    def _offer(self, entry: Entry, *, last: bool = False) -> None:
        """Offers an entry, behind those that wait for room."""
        if (data := self._payload(entry)) is None:
            return
        if last or (not self._later and self._tier.takes(len(data))):
            self._hand_over(entry, data, last=last)
        elif len(self._later) < LATER:
            self._later[entry.id] = None

    def _payload(self, entry: Entry | None) -> Bytes | None:
        """What the store may lack of an entry; None if it is there, on its way, not to be shared, or not in memory."""
        if entry is None or entry.id in self.reading or not (self._tier.lacks(entry.id) and self._may_leave(entry)):
            return None
        here = entry.copies.get(self._memory.name) is True and self._usable(entry)
        return self._memory.read(entry.id) if here else None

    def _hand_over(self, entry: Entry, data: Bytes, *, last: bool = False) -> None:
        if self._tier.offer(self._label(entry, True), data, last=last):
            entry.holds += 1
            self.reading[entry.id] = entry

    def take_answers(self) -> bool:
        """Frees the entries that the tier has answered, and offers what waited for room. Returns whether there were answers."""
        keys = self._tier.answered()
        for key in keys:
            self.reading.pop(key).holds -= 1
        for key in list(islice(self._later, STEP)) if keys or not self.reading else ():
            entry = self._index.get(key)
            data = self._payload(entry)
            if data is not None and not self._tier.takes(len(data)):
                break
            del self._later[key]
            if entry is not None and data is not None:
                self._hand_over(entry, data)
        return bool(keys)
