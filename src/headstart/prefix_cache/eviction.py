"""Eviction: which entry of the full memory tier is dropped next (in the order of `eviction_order`), and which one is admitted.

An entry that was evicted, or was not admitted, leaves a *ghost*: the record of its uses. When the entry comes again, its
earlier uses still count. So a new entry that is used often is admitted in the end, and one large prompt that is used once never
is.

Ranks change with time. Those of the entries that may be evicted are computed again when they are a second old.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.eviction_order import EvictionOrder
from headstart.prefix_cache.index import Entry, Index
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST, RequestTraits, ReuseModel, ReuseStats

GHOSTS, GHOSTS_PER_ENTRY = 1 << 15, 4
"""Most ghosts: this many, or this many for each entry in the tier, whichever is more."""
STALE = 1.0
"""Seconds after which ranks are computed again."""


class Retention:
    """What the memory tier keeps and evicts. Times are seconds of one clock that never goes back.

    Args:
        saved_per_byte: seconds of prefill that an entry saves, per byte that it occupies.
    """

    def __init__(self, tier: str, index: Index, saved_per_byte: Callable[[Entry], float]) -> None:
        self._tier = tier
        self._index = index
        self._saved = saved_per_byte
        self._reuse = ReuseModel()
        self._stats: dict[BlockId, ReuseStats] = {}
        self._ghosts: OrderedDict[BlockId, ReuseStats] = OrderedDict()
        self._order = EvictionOrder()
        self._now = 0.0
        self._ranked = 0.0

    def _first(self, now: float) -> ReuseStats:
        """The statistics of an entry that is used for the first time."""
        return ReuseStats(1.0, now, 1)

    def _value(self, stats: ReuseStats, now: float) -> float:
        """The rank of an entry: the lowest is evicted first."""
        return self._reuse.value(stats, now)

    def __len__(self) -> int:
        return len(self._stats)

    def seen(self, ids: Sequence[BlockId]) -> tuple[int, int]:
        """How many of the first ids of a chain were ever used in this tier, and how many different entries have followed the
        last of these; -1 if none was used.
        """
        known, last = 0, None
        for key in ids:
            stats = self._stats.get(key) or self._ghosts.get(key)
            if stats is None and self._index.get(key) is None:
                break
            known, last = known + 1, stats
        return known, -1 if not known else 0 if last is None else last.children

    def use(self, entry: Entry, now: float, *, anew: bool = False) -> None:
        """Counts a use of an entry. The first use admits it to the tier. Callers count a hit for all ancestors too.

        Args:
            anew: compute again what the entry saves, because it may have changed.
        """
        self._now = now
        stats = self._stats.get(entry.id)
        if stats is None:
            stats = self._stats[entry.id] = self._revived(entry, now)
            stats.saved_per_byte = self._saved(entry)
            self._order.link(entry.parent)
        else:
            self._reuse.returned(stats, now)
            stats.use(now)
            if anew:
                stats.saved_per_byte = self._saved(entry)
        self._push(entry)

    def replied(self, keys: Iterable[BlockId], request_traits: RequestTraits) -> None:
        """Sets the traits of the request that has used these entries last."""
        for key in keys:
            stats = self._stats.get(key)
            if stats is not None:
                stats.request_traits = request_traits
                entry = self._index.get(key)
                if entry is not None:
                    self._push(entry)

    def request_traits(self, key: BlockId) -> RequestTraits:
        """The traits that `replied` has set."""
        stats = self._stats.get(key)
        return UNKNOWN_REQUEST if stats is None else stats.request_traits

    def last_use(self, key: BlockId) -> float | None:
        """When an entry of the tier was used last. May be called on any thread."""
        stats = self._stats.get(key)
        return None if stats is None else stats.last

    def uses(self, key: BlockId) -> int | None:
        """How often an entry of the tier was used. May be called on any thread."""
        stats = self._stats.get(key)
        return None if stats is None else stats.uses

    def soon(self, count: int, owners: Collection[bytes] = ()) -> list[Entry]:
        """About the next entries to be evicted, in order. May be called on any thread.

        Args:
            owners: those above their quota. Their entries go first.
        """
        found = (self._index.get(key) for key in self._order.soon(count, owners) if self._may_go(key))
        return [entry for entry in found if entry is not None]

    def is_leaf(self, key: BlockId) -> bool:
        """Whether an entry has no children in the tier."""
        return self._order.is_leaf(key)

    def keep(self, entry: Entry) -> None:
        """An entry of the tier is `kept` from now on."""
        self._order.remove(entry.id)

    def release(self, entry: Entry) -> None:
        """An entry of the tier is no longer `kept`."""
        self._push(entry)

    def outranks(self, newcomer: Entry, victim: Entry, now: float, request_traits: RequestTraits = UNKNOWN_REQUEST) -> bool:
        """Whether `newcomer`, if admitted now, would rank at least as high as `victim`."""
        ghost = self._ghosts.get(newcomer.id)
        stats = self._first(now) if ghost is None else replace(ghost)
        if ghost is not None:
            stats.use(now)
        stats.saved_per_byte, stats.request_traits = self._saved(newcomer), request_traits
        return self._value(stats, now) >= self._value(self._stats[victim.id], now)

    def refuse(self, entry: Entry, now: float, request_traits: RequestTraits = UNKNOWN_REQUEST) -> None:
        """Counts the use of an entry that was not admitted."""
        self._now = now
        stats = self._revived(entry, now)
        stats.request_traits = request_traits
        self._add_ghost(entry.id, stats)

    def forget(self, entry: Entry) -> None:
        """Removes an entry that has left the tier; its ghost stays."""
        stats = self._stats.pop(entry.id, None)
        if stats is None:
            return
        self._add_ghost(entry.id, stats)
        self._order.remove(entry.id)
        self._order.unlink(entry.parent)
        parent = self._index.get(entry.parent)
        if parent is not None and parent.id in self._stats:
            self._push(parent)

    def forget_ghosts(self, keys: Iterable[BlockId] | None = None) -> None:
        """Drops the ghosts of these entries, or all ghosts, because their text was deleted."""
        for key in list(self._ghosts) if keys is None else keys:
            stats = self._ghosts.pop(key, None)
            if stats is not None:
                self._reuse.lost(stats, self._now)
        if keys is None:
            self._rank()  # which also drops old ids from the heaps

    def victim(self, owners: Collection[bytes] = ()) -> Entry | None:
        """The entry to evict next; None if none may go. Does not remove it: call `forget`.

        Args:
            owners: if one of their entries may be evicted, it is one of theirs.
        """
        if self._now - self._ranked >= STALE:
            if self._reuse.due:
                self._reuse.learn(chain(self._stats.values(), self._ghosts.values()), self._now)
            self._rank()
        key = self._order.lowest(owners, self._may_go)
        return None if key is None else self._index.get(key)

    def _may_go(self, key: BlockId) -> bool:
        entry = self._index.get(key)
        return entry is not None and self._tier in entry.copies and not (entry.pins or entry.kept)

    def _revived(self, entry: Entry, now: float) -> ReuseStats:
        """The statistics of an entry that is used now and is not in the tier. Its ghost, if it has one, is removed."""
        stats = self._ghosts.pop(entry.id, None)
        if stats is None:
            before = self._stats.get(entry.parent) or self._ghosts.get(entry.parent)
            if before is not None and not entry.state and len(entry.tokens) == self._index.block_size:
                before.children += 1
            return self._first(now)
        self._reuse.returned(stats, now)
        stats.use(now)
        return stats

    def _add_ghost(self, key: BlockId, stats: ReuseStats) -> None:
        self._reuse.left()
        self._ghosts[key] = stats
        if len(self._ghosts) > max(GHOSTS, GHOSTS_PER_ENTRY * len(self._stats)):
            self._reuse.lost(self._ghosts.popitem(last=False)[1], self._now)

    def _push(self, entry: Entry) -> None:
        """Puts an entry into the order, if it is a leaf that may be evicted."""
        if self._order.is_leaf(entry.id) and not entry.kept:
            stats = self._stats[entry.id]
            self._order.push(entry.id, self._value(stats, self._now), stats.last, entry.start, entry.owner)

    def _rank(self) -> None:
        """Computes all ranks again."""
        self._order.rerank(lambda key: self._value(self._stats[key], self._now))
        self._ranked = self._now
