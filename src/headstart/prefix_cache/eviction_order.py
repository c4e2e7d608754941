"""Eviction order: which entry of a full tier is dropped next. Memory and disk have the same order.

Entries are ranked by one currency: seconds of prefill saved per byte, times the expected rate of reuse (`reuse_model`). The
entry with the lowest rank is evicted first. An entry with children in the tier (entries that follow it) is never evicted:
without it, they would be useless. Entries of owners above their quota (`quota`) are evicted before all others.

Example: a tier holds the chain A ─▶ B ─▶ C and the chain A ─▶ D. Only C and D may be evicted. When C is gone, B may be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import chain, islice

from sortedcontainers import SortedList

from headstart.interfaces.tokens import BlockId

SOON = 64
"""Leaves that are looked at for each entry that `EvictionOrder.soon` returns."""

NEAR = 0.01
"""Part of a rank by which it may be wrong, so that a leaf is moved only if it matters."""

_RankedLeaf = tuple[float, float, int, BlockId, bytes]
# Rank, last use, minus the position (of equals the deeper one goes first), id, owner.


class EvictionOrder:
    """The entries of a tier that may be evicted, the next one first. It knows no entries, only ids. Memory uses it; the disk
    has the same order in its catalogue (`tiers/disk/ranks`).

    An entry is a *leaf* if it has no children in the tier. Only leaves may be evicted: callers `push` leaves only, and `remove`
    an entry when it leaves the tier or gets a child. Each call costs O(log n) at most.

    Args:
        by_owner: whether `lowest` and `soon` are asked for owners.
    """

    def __init__(self, *, by_owner: bool = True) -> None:
        self._leaves: OrderedDict[BlockId, _RankedLeaf] = OrderedDict()  # in the order in which they were pushed
        self._order: SortedList[_RankedLeaf] = SortedList()
        self._own: dict[bytes, SortedList[_RankedLeaf]] | None = {} if by_owner else None
        self._aside: dict[BlockId, None] = {}  # leaves that could not go when their turn came; they are not in the lists

    def __len__(self) -> int:
        return len(self._leaves)

    def push(self, key: BlockId, rank: float, last: float, start: int, owner: bytes) -> None:
        """A leaf may be evicted, or its rank has changed. `last`: time of its last use. `start`: its position."""
        self.remove(key)
        item = self._leaves[key] = (rank, last, -start, key, owner)
        self._order.add(item)
        if self._own is not None:
            self._own.setdefault(owner, SortedList()).add(item)

    def remove(self, key: BlockId) -> None:
        """An entry has left the tier, or has a child there now."""
        item = self._leaves.pop(key, None)
        if item is not None and self._aside.pop(key, item) is item:
            self._take(item)

    def rank(self, key: BlockId) -> float:
        """The rank of a leaf when it was pushed."""
        return self._leaves[key][0]

    def renew(self, count: int, rank: Callable[[BlockId], float]) -> None:
        """Ranks the `count` leaves again that were ranked longest ago. One whose rank is `NEAR` the old keeps its place."""
        for key, (old, last, depth, _, owner) in list(islice(self._leaves.items(), count)):
            new = rank(key)
            if abs(new - old) > NEAR * old:
                self.push(key, new, last, -depth, owner)
            else:
                self._leaves.move_to_end(key)

    def renew_all(self, rank: Callable[[BlockId], float]) -> None:
        """Ranks all leaves again. For each, it takes a third of the time of `renew`."""
        for key, (_, last, depth, _, owner) in self._leaves.items():
            self._leaves[key] = (rank(key), last, depth, key, owner)
        listed = [item for key, item in self._leaves.items() if key not in self._aside]
        self._order = SortedList(listed)
        if self._own is not None:
            self._own = {}
            for item in listed:
                self._own.setdefault(item[4], SortedList()).add(item)

    def lowest(self, owners: Collection[bytes] = (), may_go: Callable[[BlockId], bool] = lambda _: True) -> BlockId | None:
        """The entry to evict next; None if there is none that `may_go`. It stays in the order. Others that are found on the way
        are set `aside`.

        Args:
            owners: if one of their entries may be evicted, it is one of theirs.
        """
        lowest = None
        if owners:
            own = self._own or {}
            found = (self._first(own[owner], may_go) for owner in owners if owner in own)
            lowest = min((item for item in found if item is not None), default=None)
        lowest = lowest or self._first(self._order, may_go)
        return None if lowest is None else lowest[3]

    @property
    def any_aside(self) -> bool:
        return bool(self._aside)

    def aside(self, count: int | None = None) -> list[BlockId]:
        """The leaves that were set aside: `count` of them, in turn, or all. They come back when they are pushed."""
        found = list(islice(self._aside, count))
        for key in found:
            del self._aside[key]
            self._aside[key] = None
        return found

    def soon(self, count: int, owners: Collection[bytes] = ()) -> list[BlockId]:
        """About the next `count` entries to be evicted, in order. For any thread: if the lists change meanwhile, an entry
        may be left out.

        Args:
            owners: their entries go first.
        """
        own = self._own or {}
        first = sorted(chain.from_iterable(islice(own.get(owner, ()), count) for owner in owners))
        others = (item for item in islice(self._order, SOON * count) if item[4] not in owners)
        return list(dict.fromkeys(item[3] for item in islice(chain(first, others), count)))

    def _first(self, items: SortedList[_RankedLeaf], may_go: Callable[[BlockId], bool]) -> _RankedLeaf | None:
        while items:
            item = items[0]
            if may_go(item[3]):
                return item
            self._take(item)
            self._aside[item[3]] = None
        return None

    def _take(self, item: _RankedLeaf) -> None:
        """Takes a leaf out of the lists."""
        self._order.remove(item)
        if self._own is not None:
            own = self._own[item[4]]
            own.remove(item)
            if not own:
                del self._own[item[4]]
