"""Eviction order: which entry of a full tier is dropped next. Memory and disk have the same order.

Entries are ranked by one currency: seconds of prefill saved per byte, times the expected rate of reuse (`reuse_model`). The
entry with the lowest rank is evicted first. An entry with children in the tier (entries that follow it) is never evicted:
without it, they would be useless. Entries of owners above their quota (`quota`) are evicted before all others.

Example: a tier holds the chain A ─▶ B ─▶ C and the chain A ─▶ D. Only C and D may be evicted. When C is gone, B may be evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection

from headstart.interfaces.tokens import BlockId

SOON = 64
"""Items of the heap that are looked at for each entry that `EvictionOrder.soon` returns."""

_RankedEntry = tuple[float, float, int, BlockId, bytes]
# Rank, last use, minus the position (of equals the deeper one goes first), id, owner.


class EvictionOrder:
    """The entries of a tier that may be evicted, the next one first. It knows no entries, only ids. Memory uses it; the disk
    has the same order in its catalogue (`tiers/disk/ranks`).

    An entry is a *leaf* if it has no children in the tier. Only leaves may be evicted. A caller that evicts one calls `remove`
    and `unlink`. If its parent is a leaf now, the caller `push`es that.
    """

    def __init__(self) -> None:
        self._children: dict[BlockId, int] = {}  # number, by parent
        self._leaves: dict[BlockId, _RankedEntry] = {}  # as they are in the heaps
        self._heap: list[_RankedEntry] = []
        self._own: dict[bytes, list[_RankedEntry]] | None = None  # by owner; built when they are asked for

    def link(self, parent: BlockId) -> None:
        """An entry after `parent` has come to the tier."""
        self._children[parent] = self._children.get(parent, 0) + 1
        self._leaves.pop(parent, None)

    def unlink(self, parent: BlockId) -> None:
        """An entry after `parent` has left the tier."""
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
        else:
            del self._children[parent]

    def is_leaf(self, key: BlockId) -> bool:
        """Whether an entry has no children in the tier."""
        return key not in self._children

    def push(self, key: BlockId, rank: float, last: float, start: int, owner: bytes) -> None:
        """A leaf may be evicted, or its rank has changed. `last`: time of its last use. `start`: its position."""
        item = self._leaves[key] = (rank, last, -start, key, owner)
        heapq.heappush(self._heap, item)
        if self._own is not None:
            heapq.heappush(self._own.setdefault(owner, []), item)
        if len(self._heap) > 64 + 4 * len(self._leaves):
            self._rebuild()

    def remove(self, key: BlockId) -> None:
        """An entry has left the tier."""
        self._leaves.pop(key, None)

    def rerank(self, rank: Callable[[BlockId], float]) -> None:
        """Computes all ranks again."""
        for key, (_, last, depth, _, owner) in self._leaves.items():
            self._leaves[key] = (rank(key), last, depth, key, owner)
        self._rebuild()

    def lowest(self, owners: Collection[bytes] = (), may_go: Callable[[BlockId], bool] = lambda _: True) -> BlockId | None:
        """The entry to evict next; None if there is none that `may_go`. It stays in the order.

        Args:
            owners: if one of their entries may be evicted, it is one of theirs.
        """
        if owners and self._own is None:
            self._own = {}
            for item in self._leaves.values():
                self._own.setdefault(item[4], []).append(item)
            for heap in self._own.values():
                heapq.heapify(heap)
        own = self._own or {}
        found = [first for owner in owners if owner in own and (first := self._first(own[owner], may_go)) is not None]
        lowest = min(found) if found else self._first(self._heap, may_go)
        return None if lowest is None else lowest[3]

    def soon(self, count: int, owners: Collection[bytes] = ()) -> list[BlockId]:
        """About the next `count` entries to be evicted, in order. For any thread: it reads a part of the heap only.

        Args:
            owners: their entries go first.
        """
        leaves = (item for item in self._heap[: SOON * count] if self._leaves.get(item[3]) is item)
        return [item[3] for item in heapq.nsmallest(count, leaves, key=lambda item: (item[4] not in owners, item))]

    def _first(self, heap: list[_RankedEntry], may_go: Callable[[BlockId], bool]) -> _RankedEntry | None:
        """The lowest item of a heap whose entry may be evicted. It stays in the heap."""
        skipped: list[_RankedEntry] = []
        found: _RankedEntry | None = None
        while heap and found is None:
            item = heap[0]
            if self._leaves.get(item[3]) is not item:
                heapq.heappop(heap)  # the entry was used again, has left, or has children; its present item is another one
            elif may_go(item[3]):
                found = item
            else:
                skipped.append(heapq.heappop(heap))
        for item in skipped:
            heapq.heappush(heap, item)
        return found

    def _rebuild(self) -> None:
        self._heap = list(self._leaves.values())
        heapq.heapify(self._heap)
        self._own = None
