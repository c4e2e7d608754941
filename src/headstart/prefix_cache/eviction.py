"""Eviction: which entry of a full tier is dropped next.

Entries are ranked by one currency: seconds of prefill saved per byte, times the expected rate of reuse (`reuse_model`). The
entry with the lowest rank is evicted first. An entry with children in the tier (entries that follow it) is never evicted:
without it, they would be useless.

Example: a tier holds the chain A ─▶ B ─▶ C and the chain A ─▶ D. Only C and D may be evicted. When C is gone, B may be evicted.

An entry that was evicted, or was not admitted, leaves a *ghost*: the record of its uses. When the entry comes again, its
earlier uses still count. So a new entry that is used often is admitted in the end, and one large prompt that is used once never
is.

Ranks change with time. Those of the entries that may be evicted are computed again when they are a second old.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.index import Entry, Index
from headstart.prefix_cache.reuse_model import POLICIES, UNKNOWN_REQUEST, RequestTraits, ReuseModel, ReuseStats

GHOSTS, GHOSTS_A_PIECE = 1 << 15, 4
"""Most ghosts: this many, or this many for each entry in the tier, whichever is more."""
STALE = 1.0
"""Seconds after which ranks are computed again."""

_RankedEntry = tuple[float, float, int, BlockId]
# Rank, last use, minus the position (of equals the deeper one goes first), id.


class Retention:
    """The order of eviction in one tier. Times are seconds of one clock that never goes back.

    Args:
        saved_per_byte: seconds of prefill that an entry saves, per byte that it occupies.
        policy: a key of `POLICIES`.
        half_life: seconds in which the weight of a use halves, for policies that count uses.
    """

    def __init__(
        self,
        tier: str,
        index: Index,
        saved_per_byte: Callable[[Entry], float],
        policy: str = "value",
        half_life: float = 60.0,
    ) -> None:
        self._tier = tier
        self._index = index
        self._saved = saved_per_byte
        self._policy = POLICIES[policy]
        self._half_life = half_life
        self._reuse = ReuseModel()
        self._stats: dict[BlockId, ReuseStats] = {}
        self._dependants: dict[BlockId, int] = {}
        self._ghosts: OrderedDict[BlockId, ReuseStats] = OrderedDict()
        self._leaves: dict[BlockId, _RankedEntry] = {}  # by id, as they are in the heap
        self._heap: list[_RankedEntry] = []
        self._own: dict[bytes, list[_RankedEntry]] = {}  # by owner: heaps that were requested since ranks were computed
        self._now = 0.0
        self._ranked = 0.0

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
            self._dependants[entry.parent] = self._dependants.get(entry.parent, 0) + 1
            self._leaves.pop(entry.parent, None)
        else:
            self._reuse.returned(stats, now)
            stats.use(now, self._half_life)
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
                if key in self._leaves and entry is not None:
                    self._push(entry)

    def request_traits(self, key: BlockId) -> RequestTraits:
        """The traits that `replied` has set."""
        stats = self._stats.get(key)
        return UNKNOWN_REQUEST if stats is None else stats.request_traits

    def is_leaf(self, key: BlockId) -> bool:
        """Whether an entry has no children in the tier."""
        return key not in self._dependants

    def outranks(self, newcomer: Entry, victim: Entry, now: float, request_traits: RequestTraits = UNKNOWN_REQUEST) -> bool:
        """Whether `newcomer`, if admitted now, would rank at least as high as `victim`."""
        ghost = self._ghosts.get(newcomer.id)
        stats = ReuseStats(self._saved(newcomer), now, 1, now / self._half_life, request_traits)
        if ghost is not None:
            stats.heat, stats.uses = ghost.heat, ghost.uses
            stats.use(now, self._half_life)
        return self._policy(stats, self._reuse, now) >= self._policy(self._stats[victim.id], self._reuse, now)

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
        self._leaves.pop(entry.id, None)
        left = self._dependants[entry.parent] - 1
        if left:
            self._dependants[entry.parent] = left
        else:
            del self._dependants[entry.parent]
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
        """The entry to evict next; None if all entries are pinned. Does not remove it: call `forget`.

        Args:
            owners: if one of their entries may be evicted, it is one of theirs.
        """
        if self._now - self._ranked >= STALE:
            if self._reuse.due:
                self._reuse.learn(chain(self._stats.values(), self._ghosts.values()), self._now)
            self._rank()
        lowest = [item for owner in owners if (item := self._lowest(self._of(owner))) is not None]
        item = min(lowest) if lowest else self._lowest(self._heap)
        return None if item is None else self._index.get(item[3])

    def _lowest(self, heap: list[_RankedEntry]) -> _RankedEntry | None:
        """The lowest item of a heap whose entry may be evicted. It stays in the heap."""
        skipped: list[_RankedEntry] = []
        found: _RankedEntry | None = None
        while heap and found is None:
            item = heapq.heappop(heap)
            if self._leaves.get(item[3]) is not item:
                continue  # the entry was used again, has left, or has children; its present item is another one
            entry = self._index.get(item[3])
            if entry is None or self._tier not in entry.copies:
                continue
            skipped.append(item)
            found = None if entry.pins else item
        for item in skipped:
            heapq.heappush(heap, item)
        return found

    def _of(self, owner: bytes) -> list[_RankedEntry]:
        """The heap of an owner's entries."""
        heap = self._own.get(owner)
        if heap is None:
            heap = self._own[owner] = [item for item in self._leaves.values() if self._owner(item[3]) == owner]
            heapq.heapify(heap)
        return heap

    def _owner(self, key: BlockId) -> bytes:
        entry = self._index.get(key)
        return b"" if entry is None else entry.owner

    def _revived(self, entry: Entry, now: float) -> ReuseStats:
        """The statistics of an entry that is used now and is not in the tier. Its ghost, if it has one, is removed."""
        stats = self._ghosts.pop(entry.id, None)
        if stats is None:
            before = self._stats.get(entry.parent) or self._ghosts.get(entry.parent)
            if before is not None and not entry.state and len(entry.tokens) == self._index.block_size:
                before.children += 1
            return ReuseStats(1.0, now, 1, now / self._half_life)
        self._reuse.returned(stats, now)
        stats.use(now, self._half_life)
        return stats

    def _add_ghost(self, key: BlockId, stats: ReuseStats) -> None:
        self._reuse.left()
        self._ghosts[key] = stats
        if len(self._ghosts) > max(GHOSTS, GHOSTS_A_PIECE * len(self._stats)):
            self._reuse.lost(self._ghosts.popitem(last=False)[1], self._now)

    def _push(self, entry: Entry) -> None:
        """Pushes an entry to the heaps, if it may be evicted."""
        if entry.id in self._dependants:
            return
        stats = self._stats[entry.id]
        rank = self._policy(stats, self._reuse, self._now)
        item = self._leaves[entry.id] = (rank, stats.last, -entry.start, entry.id)
        heapq.heappush(self._heap, item)
        if len(self._heap) > 64 + 4 * len(self._leaves):
            self._heap = list(self._leaves.values())
            heapq.heapify(self._heap)
            self._own.clear()
        if entry.owner in self._own:
            heapq.heappush(self._own[entry.owner], item)

    def _rank(self) -> None:
        """Computes all ranks again."""
        for key, (_, last, depth, _) in self._leaves.items():
            rank = self._policy(self._stats[key], self._reuse, self._now)
            self._leaves[key] = (rank, last, depth, key)
        self._heap = list(self._leaves.values())
        heapq.heapify(self._heap)
        self._own.clear()
        self._ranked = self._now
