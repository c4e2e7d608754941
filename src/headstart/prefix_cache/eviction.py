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
from headstart.prefix_cache.reuse_model import POLICIES, UNKNOWN, About, Reuse, Usage

GHOSTS, GHOSTS_A_PIECE = 1 << 15, 4
"""Pieces whose uses are remembered after they have gone: so many in all, or for each that is there if that is more."""
STALE = 1.0
"""Seconds after which ranks, and what they are worked out by, are worked out anew."""

_Item = tuple[float, float, int, BlockId]
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
        self._reuse = Reuse()
        self._usage: dict[BlockId, Usage] = {}
        self._dependants: dict[BlockId, int] = {}
        self._ghosts: OrderedDict[BlockId, Usage] = OrderedDict()
        self._leaves: dict[BlockId, _Item] = {}  # with their place in the heap
        self._heap: list[_Item] = []
        self._own: dict[bytes, list[_Item]] = {}  # the same, of the owners that were asked for since ranks were worked out
        self._now = 0.0
        self._ranked = 0.0

    def __len__(self) -> int:
        return len(self._usage)

    def seen(self, ids: Sequence[BlockId]) -> tuple[int, int]:
        """How many of the first pieces of a chain have ever been used here, and by how many different ones the last of those
        was followed; -1 if none has.
        """
        known, last = 0, None
        for piece in ids:
            usage = self._usage.get(piece) or self._ghosts.get(piece)
            if usage is None and self._index.get(piece) is None:
                break
            known, last = known + 1, usage
        return known, -1 if not known else 0 if last is None else last.children

    def use(self, entry: Entry, now: float, *, anew: bool = False) -> None:
        """Counts a use of a piece; the first one admits it. Callers count a hit for all its ancestors too.

        `anew`: what it is worth may have changed.
        """
        self._now = now
        usage = self._usage.get(entry.id)
        if usage is None:
            usage = self._usage[entry.id] = self._risen(entry, now)
            usage.saved_per_byte = self._saved(entry)
            self._dependants[entry.parent] = self._dependants.get(entry.parent, 0) + 1
            self._leaves.pop(entry.parent, None)
        else:
            self._reuse.returned(usage, now)
            usage.use(now, self._half_life)
            if anew:
                usage.saved_per_byte = self._saved(entry)
        self._place(entry)

    def replied(self, pieces: Iterable[BlockId], about: About) -> None:
        """Tells of the request that has used these pieces last."""
        for piece in pieces:
            usage = self._usage.get(piece)
            if usage is not None:
                usage.about = about
                entry = self._index.get(piece)
                if piece in self._leaves and entry is not None:
                    self._place(entry)

    def about(self, piece: BlockId) -> About:
        """What `replied` said of a piece."""
        usage = self._usage.get(piece)
        return UNKNOWN if usage is None else usage.about

    def leaf(self, piece: BlockId) -> bool:
        """Whether nothing in the tier hangs on a piece."""
        return piece not in self._dependants

    def outranks(self, newcomer: Entry, victim: Entry, now: float, about: About = UNKNOWN) -> bool:
        """Whether a piece that would be admitted now is worth at least what `victim` is."""
        ghost = self._ghosts.get(newcomer.id)
        usage = Usage(self._saved(newcomer), now, 1, now / self._half_life, about)
        if ghost is not None:
            usage.heat, usage.uses = ghost.heat, ghost.uses
            usage.use(now, self._half_life)
        return self._policy(usage, self._reuse, now) >= self._policy(self._usage[victim.id], self._reuse, now)

    def refuse(self, entry: Entry, now: float, about: About = UNKNOWN) -> None:
        """Counts the use of a piece that was not let in."""
        self._now = now
        usage = self._risen(entry, now)
        usage.about = about
        self._haunt(entry.id, usage)

    def forget(self, entry: Entry) -> None:
        """The piece has left the tier."""
        usage = self._usage.pop(entry.id, None)
        if usage is None:
            return
        self._haunt(entry.id, usage)
        self._leaves.pop(entry.id, None)
        left = self._dependants[entry.parent] - 1
        if left:
            self._dependants[entry.parent] = left
        else:
            del self._dependants[entry.parent]
            parent = self._index.get(entry.parent)
            if parent is not None and parent.id in self._usage:
                self._place(parent)

    def lay(self, pieces: Iterable[BlockId] | None = None) -> None:
        """Forgets the ghosts of these pieces, or all: nothing is to be known of them any more."""
        for piece in list(self._ghosts) if pieces is None else pieces:
            usage = self._ghosts.pop(piece, None)
            if usage is not None:
                self._reuse.lost(usage, self._now)
        if pieces is None:
            self._rank()  # nor are they to stand where ranks were worked out

    def victim(self, owners: Collection[bytes] = ()) -> Entry | None:
        """The piece to evict next, or None if all that is left is pinned. Does not remove it: call `forget`.

        If any piece of `owners` may go, it is one of theirs.
        """
        if self._now - self._ranked >= STALE:
            if self._reuse.due:
                self._reuse.learn(chain(self._usage.values(), self._ghosts.values()), self._now)
            self._rank()
        lowest = [item for owner in owners if (item := self._lowest(self._of(owner))) is not None]
        item = min(lowest) if lowest else self._lowest(self._heap)
        return None if item is None else self._index.get(item[3])

    def _lowest(self, heap: list[_Item]) -> _Item | None:
        """The lowest item of a heap whose piece may go; it stays there."""
        skipped: list[_Item] = []
        found: _Item | None = None
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

    def _of(self, owner: bytes) -> list[_Item]:
        """The heap of an owner's pieces."""
        heap = self._own.get(owner)
        if heap is None:
            heap = self._own[owner] = [item for item in self._leaves.values() if self._owner(item[3]) == owner]
            heapq.heapify(heap)
        return heap

    def _owner(self, piece: BlockId) -> bytes:
        entry = self._index.get(piece)
        return b"" if entry is None else entry.owner

    def _risen(self, entry: Entry, now: float) -> Usage:
        """The usage of a piece that is used now and is not in the tier; its ghost, if it has one, is gone then."""
        usage = self._ghosts.pop(entry.id, None)
        if usage is None:
            before = self._usage.get(entry.parent) or self._ghosts.get(entry.parent)
            if before is not None and not entry.state and len(entry.tokens) == self._index.block_size:
                before.children += 1
            return Usage(1.0, now, 1, now / self._half_life)
        self._reuse.returned(usage, now)
        usage.use(now, self._half_life)
        return usage

    def _haunt(self, piece: BlockId, usage: Usage) -> None:
        self._reuse.left()
        self._ghosts[piece] = usage
        if len(self._ghosts) > max(GHOSTS, GHOSTS_A_PIECE * len(self._usage)):
            self._reuse.lost(self._ghosts.popitem(last=False)[1], self._now)

    def _place(self, entry: Entry) -> None:
        """Gives a piece its place in the heap, if it may go."""
        if entry.id in self._dependants:
            return
        usage = self._usage[entry.id]
        rank = self._policy(usage, self._reuse, self._now)
        item = self._leaves[entry.id] = (rank, usage.last, -entry.start, entry.id)
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
            rank = self._policy(self._usage[piece], self._reuse, self._now)
            self._leaves[piece] = (rank, last, depth, piece)
        self._heap = list(self._leaves.values())
        heapq.heapify(self._heap)
        self._own.clear()
        self._ranked = self._now
