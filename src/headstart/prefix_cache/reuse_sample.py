"""Reuse sample: a bounded part of a tier's entries and ghosts, from which the reuse model learns.

An id is a hash. So those whose ids are below a bound are a random sample, and the same one in each run. When there are too
many, the bound is halved. Of a small tier nothing is kept here: its entries are passed over when the sample is drawn.

Example: of 1,000,000 entries, those are in the sample whose ids begin with 6 zero bits. They are about 15,600, and each
stands for 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.reuse_model import ReuseHistory

SAMPLE = 16_384
"""Most entries of the sample. It has about as many ghosts and entries together, or fewer."""
_SMALL = SAMPLE // 2
"""Entries of a tier that has shrunk, from which on it counts as small again."""
_ID_BITS = 256
_REFILL, _SCARCE = 2 * SAMPLE, SAMPLE // 4
"""With at most so many entries, of which fewer than `_SCARCE` are in the sample, it is drawn again."""

Everything = Callable[[], Iterable[tuple[BlockId, ReuseHistory]]]
"""Passes over all entries of a tier."""


class ReuseSample:
    """Some entries of a tier.

    Attributes:
        weight: how many entries each of those stands for that are kept here.
    """

    def __init__(self, everything: Everything) -> None:
        self._everything = everything
        self.weight, self._bound = 1, _bound(1)
        self._stats: dict[BlockId, ReuseHistory] | None = None  # of a large tier

    def __len__(self) -> int:
        """The number of entries that are kept here."""
        return 0 if self._stats is None else len(self._stats)

    def put(self, key: BlockId, stats: ReuseHistory) -> None:
        """An entry came to a tier that has more than `SAMPLE`."""
        if self._stats is None:
            self._draw()
        self._put(key, stats)

    def discard(self, key: BlockId) -> None:
        """An entry has gone."""
        if self._stats is not None:
            self._stats.pop(key, None)

    def drawn(self, total: int, ghosts: int) -> tuple[Iterable[ReuseHistory], int]:
        """The sample of a tier of `total` entries, and how many entries or ghosts each of it stands for. Of a small tier, the
        tier is passed over meanwhile.
        """
        if self._stats is None or total <= _SMALL:
            self.weight, self._bound, self._stats = 1, _bound(1), None
        elif self.weight > 1 and len(self._stats) < _SCARCE and total <= _REFILL:
            self._draw()
        weight = self.weight
        while total + ghosts > weight * SAMPLE:
            weight *= 2
        bound = _bound(weight)
        every = self._everything() if self._stats is None else list(self._stats.items())
        return (stats for key, stats in every if weight == 1 or key <= bound), weight

    def _draw(self) -> None:
        self.weight, self._bound, self._stats = 1, _bound(1), {}
        for key, stats in self._everything():
            self._put(key, stats)

    def _put(self, key: BlockId, stats: ReuseHistory) -> None:
        assert self._stats is not None
        if key <= self._bound:
            self._stats[key] = stats
            while len(self._stats) > SAMPLE:
                self.weight *= 2
                self._bound = _bound(self.weight)
                self._stats = {key: stats for key, stats in self._stats.items() if key <= self._bound}


def _bound(weight: int) -> bytes:
    """The highest id of a share of 1 / `weight` of all ids."""
    return ((1 << _ID_BITS) // weight - 1).to_bytes(_ID_BITS // 8)
