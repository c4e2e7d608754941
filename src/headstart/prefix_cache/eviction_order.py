"""Eviction order: which entry of a full tier is dropped next. Memory and disk have the same order.

Entries are ranked by one currency: prefill saved per byte, times the expected rate of reuse (`reuse_model`). Only entries of
one tier are compared, so memory may count prefill in tokens, and disk in seconds. The entry with the lowest rank is evicted
first. An entry with children in the tier (entries that follow it) is never evicted: without it, they would be useless. Entries
of owners above their quota (`quota`) are evicted before all others.

Example: a tier holds the chain A ─▶ B ─▶ C and the chain A ─▶ D. Only C and D may be evicted. When C is gone, B may be evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from typing import Generic

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.ranked_leaves import LeafT, Place, RankedLeaves, place_of

SOON = 64
"""Leaves that are looked at for each entry that `EvictionOrder.soon` returns."""

NEAR = 0.01
"""Part of a rank by which it may be wrong, so that a leaf is moved only if it matters."""


class EvictionOrder(Generic[LeafT]):
    """The entries of a tier that may be evicted, the next one first. Memory uses it; the disk has the same order in its
    catalogue (`tiers/disk/ranks`).

    An entry is a *leaf* if it has no children in the tier. Only leaves may be evicted: callers `push` leaves only, and `remove`
    an entry when it leaves the tier or gets a child, and before its last use changes. Each call costs O(log n) at most.

    Args:
        by_owner: whether `lowest` and `soon` are asked for owners.
    """

    def __init__(self, *, by_owner: bool = True) -> None:
        self._order: RankedLeaves[LeafT] = RankedLeaves()
        self._own: dict[bytes, RankedLeaves[LeafT]] | None = {} if by_owner else None
        self._aside: dict[BlockId, LeafT] = {}  # leaves that could not go when their turn came; they are not in the lists
        self._count = 0
        self._hand: Place = ()  # of the leaf that was ranked again last

    def __len__(self) -> int:
        return self._count + len(self._aside)

    def __iter__(self) -> Iterator[LeafT]:
        """All leaves, the next one to be evicted first, and at the end those that are aside. If it changes meanwhile, some may
        be left out, or come twice.
        """
        yield from self._order
        yield from list(self._aside.values())

    def push(self, leaf: LeafT, rank: float) -> None:
        """A leaf may be evicted, or its rank has changed."""
        if leaf.rank is not None or self._aside:
            self.remove(leaf)
        leaf.rank = rank
        self._order.add(leaf)
        self._count += 1
        if self._own is not None:
            self._own.setdefault(leaf.owner, RankedLeaves()).add(leaf)

    def remove(self, leaf: LeafT) -> None:
        """An entry has left the tier, or has a child there now, or will be pushed again."""
        if leaf.rank is None:
            if self._aside:
                self._aside.pop(leaf.id, None)
            return
        self._order.remove(leaf)
        self._count -= 1
        if self._own is not None:
            own = self._own[leaf.owner]
            own.remove(leaf)
            if not own:
                del self._own[leaf.owner]
        leaf.rank = None

    def renew(self, count: int, rank: Callable[[LeafT], float]) -> bool:
        """Ranks the next `count` leaves again, from the lowest rank up to the highest. Returns whether there are more.

        One whose rank is `NEAR` the old one keeps it, and its place. Those that rise are seen again, and no leaf is missed: one
        whose place changes has just been ranked.
        """
        leaves = self._order.after(self._hand, count + 1)
        more = len(leaves) > count
        self._hand = place_of(leaves[count - 1]) if more else ()
        for leaf in leaves[:count]:
            new, old = rank(leaf), leaf.rank
            if old is None or abs(new - old) > NEAR * old:
                self.push(leaf, new)
        return more

    def renew_all(self, rank: Callable[[LeafT], float]) -> None:
        """Ranks all leaves again. For each, it takes a third of the time of `renew`."""
        for leaf in self._order:
            leaf.rank = rank(leaf)
        self._order = RankedLeaves(self._order)
        if self._own is not None:
            self._own = {owner: RankedLeaves(leaves) for owner, leaves in self._own.items()}

    def lowest(self, owners: Collection[bytes] = (), may_go: Callable[[LeafT], bool] = lambda _: True) -> LeafT | None:
        """The entry to evict next; None if there is none that `may_go`. It stays in the order. Others that are found on the way
        are set `aside`.

        Args:
            owners: if one of their entries may be evicted, it is one of theirs.
        """
        if owners and self._own:
            found = [self._first(self._own[owner], may_go) for owner in owners if owner in self._own]
            lowest = min((leaf for leaf in found if leaf is not None), key=place_of, default=None)
            if lowest is not None:
                return lowest
        return self._first(self._order, may_go)

    @property
    def any_aside(self) -> bool:
        return bool(self._aside)

    def aside(self, count: int | None = None) -> list[LeafT]:
        """The leaves that were set aside: `count` of them, in turn, or all. They come back when they are pushed."""
        found = list(islice(self._aside.values(), count))
        for leaf in found:
            del self._aside[leaf.id]
            self._aside[leaf.id] = leaf
        return found

    def soon(self, count: int, owners: Collection[bytes] = ()) -> list[LeafT]:
        """About the next `count` entries to be evicted, in order. For any thread: if the lists change meanwhile, an entry
        may be left out.

        Args:
            owners: their entries go first.
        """
        own = self._own or {}
        first = sorted(chain.from_iterable(islice(own.get(owner, ()), count) for owner in owners), key=_sortable)
        others = (leaf for leaf in islice(self._order, SOON * count) if leaf.owner not in owners)
        return list({leaf.id: leaf for leaf in islice(chain(first, others), count)}.values())

    def _first(self, leaves: RankedLeaves[LeafT], may_go: Callable[[LeafT], bool]) -> LeafT | None:
        while (leaf := leaves.first()) is not None and not may_go(leaf):
            self.remove(leaf)
            self._aside[leaf.id] = leaf
        return leaf


def _sortable(leaf: LeafT) -> tuple[float, float]:
    """Of a leaf that the engine thread may be taking away."""
    return leaf.rank or 0.0, leaf.last
