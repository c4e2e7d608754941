"""Retention: what to keep when a tier is full.

One currency: seconds of prefill saved per byte, times the chance of reuse. The chance of reuse is taken to be proportional
to the number of uses, each halving in weight every `half_life` seconds. The order of such sums never changes while nobody
uses them (all decay alike), so a rank can be computed once per use and kept in a heap:

    rank = log2( Σ_uses 2^(t_use / half_life) ) + log2( seconds saved per byte )

A piece that is refused or has gone leaves a *ghost*: its uses still count when it comes again. So a newcomer that does
not outrank what is there is let in once it is used again, while a one-shot giant never is.

Policies are rows of `POLICIES`; `headstart`'s own is `value`.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from headstart.core.blocks import BlockId
from headstart.core.index import Entry, Index


@dataclass(slots=True)
class Usage:
    """How a piece was used. `heat` is log2 of the decayed sum of its uses, at time 0."""

    heat: float
    last: float
    saved_per_byte: float


GHOSTS = 1 << 15
"""Pieces whose uses are remembered after they have gone."""

Policy = Callable[[Usage], float]
"""Rank of a piece: the lowest goes first."""

POLICIES: dict[str, Policy] = {
    "value": lambda usage: usage.heat + math.log2(usage.saved_per_byte),
    "lfu": lambda usage: usage.heat,
    "lru": lambda usage: usage.last,
}


def _log2_add(a: float, b: float) -> float:
    """log2(2^a + 2^b)."""
    high, low = max(a, b), min(a, b)
    return high + math.log2(1.0 + 2.0 ** (low - high))


class Retention:
    """Who goes first out of one tier. A piece goes only when nothing in the tier hangs on it.

    Args:
        saved_per_byte: seconds of prefill that having the piece saves, per byte that it occupies.
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
        self._usage: dict[BlockId, Usage] = {}
        self._rank: dict[BlockId, float] = {}
        self._dependants: dict[BlockId, int] = {}
        self._heap: list[tuple[float, int, BlockId]] = []
        self._ghosts: OrderedDict[BlockId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._usage)

    def use(self, entry: Entry, now: float) -> None:
        """Counts a use of a piece; the first one admits it. Callers count a hit for all its ancestors too."""
        beat = now / self._half_life
        usage = self._usage.get(entry.id)
        if usage is None:
            heat = self._risen(entry.id, beat)
            self._ghosts.pop(entry.id, None)
            usage = self._usage[entry.id] = Usage(heat, now, self._saved(entry))
            self._dependants[entry.parent] = self._dependants.get(entry.parent, 0) + 1
        else:
            usage.heat = _log2_add(usage.heat, beat)
            usage.last = now
        self._rank[entry.id] = self._policy(usage)
        self._push(entry)

    def outranks(self, newcomer: Entry, victim: Entry, now: float) -> bool:
        """Whether a piece that would be admitted now is worth at least what `victim` is."""
        usage = Usage(self._risen(newcomer.id, now / self._half_life), now, self._saved(newcomer))
        return self._policy(usage) >= self._rank[victim.id]

    def refuse(self, piece: BlockId, now: float) -> None:
        """Counts the use of a piece that was not let in."""
        self._haunt(piece, self._risen(piece, now / self._half_life))

    def _risen(self, piece: BlockId, beat: float) -> float:
        """The heat of a piece that is used now and is not in the tier."""
        ghost = self._ghosts.get(piece)
        return beat if ghost is None else _log2_add(ghost, beat)

    def _haunt(self, piece: BlockId, heat: float) -> None:
        self._ghosts[piece] = heat
        self._ghosts.move_to_end(piece)
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)

    def forget(self, entry: Entry) -> None:
        """The piece has left the tier."""
        usage = self._usage.pop(entry.id, None)
        if usage is None:
            return
        self._haunt(entry.id, usage.heat)
        del self._rank[entry.id]
        left = self._dependants[entry.parent] - 1
        if left:
            self._dependants[entry.parent] = left
        else:
            del self._dependants[entry.parent]
            parent = self._index.get(entry.parent)
            if parent is not None and parent.id in self._usage:
                self._push(parent)

    def victim(self) -> Entry | None:
        """The piece to evict next, or None if all that is left is pinned. Does not remove it: call `forget`."""
        skipped: list[tuple[float, int, BlockId]] = []
        found: Entry | None = None
        while self._heap:
            item = heapq.heappop(self._heap)
            rank, _, piece = item
            if self._rank.get(piece) != rank or piece in self._dependants:
                continue  # stale: used again, gone, or grown a child; whatever it is now has its own heap item
            entry = self._index.get(piece)
            if entry is None or self._tier not in entry.copies:
                continue
            skipped.append(item)
            if not entry.pins:
                found = entry
                break
        for item in skipped:
            heapq.heappush(self._heap, item)
        return found

    def _push(self, entry: Entry) -> None:
        if entry.id not in self._dependants:
            # Deeper first among equals: the end of a chain is worth least without its beginning.
            heapq.heappush(self._heap, (self._rank[entry.id], -entry.start, entry.id))
        if len(self._heap) > 64 + 4 * len(self._usage):
            self._heap = [item for item in self._heap if self._rank.get(item[2]) == item[0]]
            self._heap = list(dict.fromkeys(self._heap))
            heapq.heapify(self._heap)
