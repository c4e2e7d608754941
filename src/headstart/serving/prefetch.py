"""Prefetch: reads the entries of a plan from disk to memory.

Used from the engine thread only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from headstart.interfaces.tokens import BlockId, Bytes
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.planner import Plan
from headstart.serving.memory_budget import MemoryBudget, holding
from headstart.tiers.disk import Label
from headstart.tiers.disk_tier import DiskTier
from headstart.tiers.memory import Cell
from headstart.tiers.parallel_read import Hung


class Prefetch:
    """Reads entries, several at a time, into cells of memory.

    Args:
        label: makes the description of an entry on disk; its second argument says whether the entry is canonical.
        kv_bytes_per_token: bytes of KV of one token.

    Attributes:
        fetched: entries that were read for the present request. Reading them has counted as their use.
    """

    def __init__(
        self,
        disk: DiskTier,
        memory_budget: MemoryBudget,
        label: Callable[[Entry, bool], Label],
        kv_bytes_per_token: int,
        clock: Callable[[], float],
    ) -> None:
        self.fetched: set[BlockId] = set()
        self._disk = disk
        self._memory_budget = memory_budget
        self._memory = memory_budget.memory
        self._label = label
        self._kv_bytes_per_token = kv_bytes_per_token
        self._clock = clock
        self._cost = 1e-3  # seconds to read one entry
        self._lent: list[tuple[threading.Event, Cell]] = []  # to reads that hang

    def at_hand(self, entry: Entry) -> bool:
        """Whether memory has the best known version of an entry: canonical, if any tier has that."""
        return entry.copies.get(self._memory.name) == entry.canonical

    def read(self, plan: Plan, seconds: float) -> bool:
        """Reads entries of a plan, for about `seconds`. True if nothing is left to read, or memory is full."""
        missing = [entry for entry in plan.entries if not self.at_hand(entry)]
        self._disk.keep([entry.id for entry in plan.entries])
        some = missing[: max(1, int(seconds / self._cost))]
        with holding(plan.entries):
            before = len(self.fetched)
            return self.bring(some) and (len(some) == len(missing) or len(self.fetched) == before)

    def bring(self, entries: Sequence[Entry]) -> bool:
        """Reads entries in order, as many as memory has room for. False if one is bad."""
        wanted: list[tuple[Entry, Cell]] = []
        now = self._clock()
        self._take_back()
        for entry in entries:
            if self.at_hand(entry):
                continue
            if entry.id in self._memory_budget.offload.writing:  # another version of it: the disk is reading its cell
                break
            if (cell := self._memory_budget.take(entry, now, needed=True)) is None:
                self._memory_budget.skip("restore", 1)
                break
            wanted.append((entry, cell))
        if not wanted:
            return True
        results = self._disk.read([(self._label(entry, entry.canonical), self._buffer(entry, cell)) for entry, cell in wanted])
        bad = [result for result in results if isinstance(result, Exception)]
        if len(bad) < len(wanted):  # a disk that hangs refuses at once, which is not how fast it reads
            self._cost = max(1e-6, (self._clock() - now) / len(wanted))
        if bad:
            self._memory_budget.fault("disk", bad[0], len(bad))
        for (entry, cell), result in zip(wanted, results, strict=True):
            if isinstance(result, Exception):
                if isinstance(result, Hung):
                    self._lent.append((result.over, cell))
                else:
                    self._memory.release(cell)
                self._memory_budget.offload.gone(entry.id, fault=True)
                continue
            self._memory_budget.index.add(entry, self._memory.name, canonical=entry.copies[self._disk.name])
            self._memory.commit(entry.id, cell, result)
            self._memory_budget.pins.came(entry)
            self._memory_budget.retention.use(entry, now)
            self.fetched.add(entry.id)
        return not bad

    def _buffer(self, entry: Entry, cell: Cell) -> Bytes:
        """The part of a cell that is read into: all of it for a checkpoint, whose size varies."""
        return self._memory.cell(cell)[: None if entry.state else entry.length * self._kv_bytes_per_token]

    def _take_back(self) -> None:
        """Frees the cells of hung reads that have ended."""
        for over, lent in [one for one in self._lent if one[0].is_set()]:
            self._lent.remove((over, lent))
            self._memory.release(lent)
