"""Fetch: from disk to memory, for a plan.

Used from the engine thread only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.index import Entry
from headstart.prefix_cache.planner import Plan
from headstart.serving.memory_budget import MemoryBudget, pinned
from headstart.tiers.disk import Label
from headstart.tiers.disk_tier import DiskTier
from headstart.tiers.memory import Cell
from headstart.tiers.parallel_read import Hung


class Prefetch:
    """Reads pieces, several at a time, into cells of memory.

    Args:
        label: what is written on the outside of an entry, of which the second argument says whether it is canonical.
        kv_bytes_per_token: of a token.

    Attributes:
        fetched: pieces that came for the request at hand, which counts as their use.
    """

    def __init__(
        self,
        disk: DiskTier,
        room: MemoryBudget,
        label: Callable[[Entry, bool], Label],
        kv_bytes_per_token: int,
        clock: Callable[[], float],
    ) -> None:
        self.fetched: set[BlockId] = set()
        self._disk = disk
        self._room = room
        self._memory = room.memory
        self._label = label
        self._kv_bytes_per_token = kv_bytes_per_token
        self._clock = clock
        self._cost = 1e-3  # seconds that a piece takes
        self._lent: list[tuple[threading.Event, Cell]] = []  # to a disk that hangs

    def at_hand(self, entry: Entry) -> bool:
        """Whether the best that is known of a piece is in memory."""
        return entry.copies.get(self._memory.name) == entry.canonical

    def ahead(self, plan: Plan, seconds: float) -> bool:
        """Brings pieces of a plan, for about so long; whether that was all, or all there is room for."""
        missing = [entry for entry in plan.entries if not self.at_hand(entry)]
        self._disk.keep([entry.id for entry in plan.entries])
        some = missing[: max(1, int(seconds / self._cost))]
        with pinned(plan.entries):
            before = len(self.fetched)
            return self.bring(some) and (len(some) == len(missing) or len(self.fetched) == before)

    def bring(self, entries: Sequence[Entry]) -> bool:
        """Brings pieces, as many from the first on as memory has room for. False if one is bad."""
        wanted: list[tuple[Entry, Cell]] = []
        now = self._clock()
        self._take_back()
        for entry in entries:
            if self.at_hand(entry):
                continue
            if entry.id in self._room.offload.writing:  # other bytes of it, in a cell that is being read
                break
            if (cell := self._room.take(entry, now, needed=True)) is None:
                self._room.skip("restore", 1)
                break
            wanted.append((entry, cell))
        if not wanted:
            return True
        sizes = [
            None if entry.state else len(entry.tokens) * self._kv_bytes_per_token for entry, _ in wanted
        ]  # a checkpoint's varies
        results = self._disk.read(
            [
                (self._label(entry, entry.canonical), self._memory.cell(cell)[:size])
                for (entry, cell), size in zip(wanted, sizes, strict=True)
            ]
        )
        self._cost = (self._clock() - now) / len(wanted)
        bad = [result for result in results if isinstance(result, Exception)]
        if bad:
            self._room.fault("disk", bad[0], len(bad))
        for (entry, cell), result in zip(wanted, results, strict=True):
            if isinstance(result, Exception):
                if isinstance(result, Hung):
                    self._lent.append((result.over, cell))
                else:
                    self._memory.release(cell)
                self._room.offload.gone(entry.id)
                continue
            self._memory.commit(entry.id, cell, result)
            self._room.index.add(entry, self._memory.name, canonical=entry.copies[self._disk.name])
            self._room.retention.use(entry, now)
            self.fetched.add(entry.id)
        return not bad

    def _take_back(self) -> None:
        """Frees the cells that a disk that hung does not write into any more."""
        for over, lent in [one for one in self._lent if one[0].is_set()]:
            self._lent.remove((over, lent))
            self._memory.release(lent)
