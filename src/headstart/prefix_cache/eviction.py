"""Eviction: what to drop when a tier is full.

One currency: seconds of prefill saved per byte, times the chance of reuse (`prefix_cache/reuse_model`). The piece of the lowest
rank goes first, and only when nothing in the tier hangs on it.

A piece that is refused or has gone leaves a *ghost*: its uses still count when it comes again. So a newcomer that does not
outrank what is there is let in once its uses say so, while a one-shot giant never is.

Ranks change as time goes by; those of the pieces that may go are worked out anew when they are a second old.
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
"""Pieces whose uses are remembered after they have gone: so many in all, or for each that is there if that is more."""
STALE = 1.0
"""Seconds after which ranks, and what they are worked out by, are worked out anew."""

_RankedEntry = tuple[float, float, int, BlockId]
# Rank and last use, then the deeper first: the end of a chain is worth least without its beginning.


class Retention:
    """Who goes first out of one tier. Times are seconds of any one clock, and do not go back.

    Args:
        saved_per_byte: seconds of prefill that having the piece saves, per byte that it occupies.
        policy: a row of `POLICIES`.
        half_life: seconds in which a use halves in weight, for policies that count uses.
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
        self._leaves: dict[BlockId, _RankedEntry] = {}  # with their place in the heap
        self._heap: list[_RankedEntry] = []
        self._own: dict[
            bytes, list[_RankedEntry]
        ] = {}  # the same, of the owners that were asked for since ranks were worked out
        self._now = 0.0
        self._ranked = 0.0

    def __len__(self) -> int:
        return len(self._stats)

    def seen(self, ids: Sequence[BlockId]) -> tuple[int, int]:
        """How many of the first pieces of a chain have ever been used here, and by how many different ones the last of those
        was followed; -1 if none has.
        """
        known, last = 0, None
        for piece in ids:
            stats = self._stats.get(piece) or self._ghosts.get(piece)
            if stats is None and self._index.get(piece) is None:
                break
            known, last = known + 1, stats
        return known, -1 if not known else 0 if last is None else last.children

    def use(self, entry: Entry, now: float, *, anew: bool = False) -> None:
        """Counts a use of a piece; the first one admits it. Callers count a hit for all its ancestors too.

        `anew`: what it is worth may have changed.
        """
        self._now = now
        stats = self._stats.get(entry.id)
        if stats is None:
            stats = self._stats[entry.id] = self._risen(entry, now)
            stats.saved_per_byte = self._saved(entry)
            self._dependants[entry.parent] = self._dependants.get(entry.parent, 0) + 1
            self._leaves.pop(entry.parent, None)
        else:
            self._reuse.returned(stats, now)
            stats.use(now, self._half_life)
            if anew:
                stats.saved_per_byte = self._saved(entry)
        self._place(entry)

    def replied(self, pieces: Iterable[BlockId], request_traits: RequestTraits) -> None:
        """Tells of the request that has used these pieces last."""
        for piece in pieces:
            stats = self._stats.get(piece)
            if stats is not None:
                stats.request_traits = request_traits
                entry = self._index.get(piece)
                if piece in self._leaves and entry is not None:
                    self._place(entry)

    def request_traits(self, piece: BlockId) -> RequestTraits:
        """What `replied` said of a piece."""
        stats = self._stats.get(piece)
        return UNKNOWN_REQUEST if stats is None else stats.request_traits

    def leaf(self, piece: BlockId) -> bool:
        """Whether nothing in the tier hangs on a piece."""
        return piece not in self._dependants

    def outranks(self, newcomer: Entry, victim: Entry, now: float, request_traits: RequestTraits = UNKNOWN_REQUEST) -> bool:
        """Whether a piece that would be admitted now is worth at least what `victim` is."""
        ghost = self._ghosts.get(newcomer.id)
        stats = ReuseStats(self._saved(newcomer), now, 1, now / self._half_life, request_traits)
        if ghost is not None:
            stats.heat, stats.uses = ghost.heat, ghost.uses
            stats.use(now, self._half_life)
        return self._policy(stats, self._reuse, now) >= self._policy(self._stats[victim.id], self._reuse, now)

    def refuse(self, entry: Entry, now: float, request_traits: RequestTraits = UNKNOWN_REQUEST) -> None:
        """Counts the use of a piece that was not let in."""
        self._now = now
        stats = self._risen(entry, now)
        stats.request_traits = request_traits
        self._haunt(entry.id, stats)

    def forget(self, entry: Entry) -> None:
        """The piece has left the tier."""
        stats = self._stats.pop(entry.id, None)
        if stats is None:
            return
        self._haunt(entry.id, stats)
        self._leaves.pop(entry.id, None)
        left = self._dependants[entry.parent] - 1
        if left:
            self._dependants[entry.parent] = left
        else:
            del self._dependants[entry.parent]
            parent = self._index.get(entry.parent)
            if parent is not None and parent.id in self._stats:
                self._place(parent)

    def lay(self, pieces: Iterable[BlockId] | None = None) -> None:
        """Forgets the ghosts of these pieces, or all: nothing is to be known of them any more."""
        for piece in list(self._ghosts) if pieces is None else pieces:
            stats = self._ghosts.pop(piece, None)
            if stats is not None:
                self._reuse.lost(stats, self._now)
        if pieces is None:
            self._rank()  # nor are they to stand where ranks were worked out

    def victim(self, owners: Collection[bytes] = ()) -> Entry | None:
        """The piece to evict next, or None if all that is left is pinned. Does not remove it: call `forget`.

        If any piece of `owners` may go, it is one of theirs.
        """
        if self._now - self._ranked >= STALE:
            if self._reuse.due:
                self._reuse.learn(chain(self._stats.values(), self._ghosts.values()), self._now)
            self._rank()
        lowest = [item for owner in owners if (item := self._lowest(self._of(owner))) is not None]
        item = min(lowest) if lowest else self._lowest(self._heap)
        return None if item is None else self._index.get(item[3])

    def _lowest(self, heap: list[_RankedEntry]) -> _RankedEntry | None:
        """The lowest item of a heap whose piece may go; it stays there."""
        skipped: list[_RankedEntry] = []
        found: _RankedEntry | None = None
        while heap and found is None:
            item = heapq.heappop(heap)
            if self._leaves.get(item[3]) is not item:
                continue  # used again, gone, or grown a child; whatever it is now has its own item
            entry = self._index.get(item[3])
            if entry is None or self._tier not in entry.copies:
                continue
            skipped.append(item)
            found = None if entry.pins else item
        for item in skipped:
            heapq.heappush(heap, item)
        return found

    def _of(self, owner: bytes) -> list[_RankedEntry]:
        """The heap of an owner's pieces."""
        heap = self._own.get(owner)
        if heap is None:
            heap = self._own[owner] = [item for item in self._leaves.values() if self._owner(item[3]) == owner]
            heapq.heapify(heap)
        return heap

    def _owner(self, piece: BlockId) -> bytes:
        entry = self._index.get(piece)
        return b"" if entry is None else entry.owner

    def _risen(self, entry: Entry, now: float) -> ReuseStats:
        """The usage of a piece that is used now and is not in the tier; its ghost, if it has one, is gone then."""
        stats = self._ghosts.pop(entry.id, None)
        if stats is None:
            before = self._stats.get(entry.parent) or self._ghosts.get(entry.parent)
            if before is not None and not entry.state and len(entry.tokens) == self._index.block_size:
                before.children += 1
            return ReuseStats(1.0, now, 1, now / self._half_life)
        self._reuse.returned(stats, now)
        stats.use(now, self._half_life)
        return stats

    def _haunt(self, piece: BlockId, stats: ReuseStats) -> None:
        self._reuse.left()
        self._ghosts[piece] = stats
        if len(self._ghosts) > max(GHOSTS, GHOSTS_A_PIECE * len(self._stats)):
            self._reuse.lost(self._ghosts.popitem(last=False)[1], self._now)

    def _place(self, entry: Entry) -> None:
        """Gives a piece its place in the heap, if it may go."""
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
        """Works out all ranks anew."""
        for piece, (_, last, depth, _) in self._leaves.items():
            rank = self._policy(self._stats[piece], self._reuse, self._now)
            self._leaves[piece] = (rank, last, depth, piece)
        self._heap = list(self._leaves.values())
        heapq.heapify(self._heap)
        self._own.clear()
        self._ranked = self._now
