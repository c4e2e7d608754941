"""Memory tier: equal cells in one arena of anonymous memory, under a hard byte budget.

Cells are written in place and published afterwards (`allocate` → write `cell` → `commit`), so that rows are copied once
and nothing is visible before it is complete. The arena is virtual until touched; budget that is claimed for transient
buffers is taken from the cells, whose pages go back to the system.
"""

from __future__ import annotations

import heapq
import mmap
from contextlib import suppress

import numpy as np

from headstart.errors import ConfigError
from headstart.stores.base import Bytes, Store

# Shared mappings, Python's default, get no huge pages: the first touch of each byte then costs ten times as much.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class Memory(Store):
    """A store of cells of `cell_bytes` each; with cells of no bytes (rows that cannot be moved) it holds nothing.

    Args:
        cell_bytes: size of a cell.
        budget: bytes for cells and claimed transient buffers together.

    Raises:
        ConfigError: the system refuses to reserve that much address space.
    """

    name = "memory"

    def __init__(self, cell_bytes: int, budget: int) -> None:
        self.cell_bytes = cell_bytes
        self._budget = budget
        self._claimed = 0
        self._cells: dict[bytes, int] = {}
        self._open: set[int] = set()
        self._free: list[int] = []
        self._fresh = 0
        self._capacity = budget // cell_bytes if cell_bytes else 0
        try:
            self._map = mmap.mmap(-1, max(1, self._capacity * cell_bytes), **_PRIVATE)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(f"Cannot reserve {budget} bytes of memory ({error}); lower --memory-budget.") from error
        self._returns = False
        self._advise("MADV_HUGEPAGE")
        self._arena = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def used(self) -> int:
        return (len(self._cells) + len(self._open)) * self.cell_bytes + self._claimed

    @property
    def available(self) -> int:
        """Cells that can be allocated now without evicting. Negative after a claim: evict that many first."""
        if not self.cell_bytes:
            return 0
        return (self._budget - self._claimed) // self.cell_bytes - len(self._cells) - len(self._open)

    def claim(self, transient: int) -> None:
        """Sets aside `transient` bytes of the budget for buffers outside the arena.

        If the arena has grown into them, the pages of its free cells go back to the system.
        """
        self._claimed = transient
        if self._grown:
            for cell in self._free:
                self._return(cell)

    @property
    def _grown(self) -> bool:
        """Whether the arena's touched cells and the claim together exceed the budget: then no free cell may keep its pages."""
        return self._fresh * self.cell_bytes + self._claimed > self._budget

    def _return(self, cell: int) -> None:
        first = -(-cell * self.cell_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (cell + 1) * self.cell_bytes // mmap.PAGESIZE * mmap.PAGESIZE - first
        if not self._returns:
            self._returns = True
            self._advise("MADV_NOHUGEPAGE")  # the system would refill huge pages that have become partly free
        if size > 0:
            self._advise("MADV_DONTNEED", first, size)

    def _advise(self, advice: str, *span: int) -> None:
        if (known := getattr(mmap, advice, None)) is not None:
            with suppress(OSError):  # it is only advice, and not every system takes it
                self._map.madvise(known, *span)

    def _give(self, cell: int) -> None:
        heapq.heappush(self._free, cell)
        if self._grown:
            self._return(cell)

    def allocate(self) -> int | None:
        """A cell to write into; None if the budget is used up. End with `commit` or `release`."""
        if self.available <= 0:
            return None
        if self._free:
            cell = heapq.heappop(self._free)
        else:
            cell, self._fresh = self._fresh, self._fresh + 1
        self._open.add(cell)
        return cell

    def cell(self, cell: int) -> Bytes:
        """The bytes of a cell."""
        return self._arena[cell * self.cell_bytes : (cell + 1) * self.cell_bytes]

    def commit(self, key: bytes, cell: int) -> None:
        """Publishes an allocated cell under `key`, in place of what was there."""
        self._open.remove(cell)
        old = self._cells.get(key)
        self._cells[key] = cell
        if old is not None:
            self._give(old)

    def release(self, cell: int) -> None:
        """Gives an allocated cell back unpublished."""
        self._open.remove(cell)
        self._give(cell)

    def read(self, key: bytes) -> Bytes | None:
        """A view of the bytes under `key`, valid until its `delete`; None if they are not here."""
        cell = self._cells.get(key)
        return None if cell is None else self.cell(cell)

    def delete(self, key: bytes) -> None:
        cell = self._cells.pop(key, None)
        if cell is not None:
            self._give(cell)

    def __contains__(self, key: bytes) -> bool:
        return key in self._cells

    def __len__(self) -> int:
        return len(self._cells)

    def close(self) -> None:
        """Gives all memory back. Afterwards there is nothing in it, and nothing may be put in."""
        self._cells.clear()
        self._open.clear()
        self._free.clear()
        self._fresh = self._budget = self._claimed = 0
        self._advise("MADV_DONTNEED")

    def check(self) -> None:
        """Raises AssertionError if cells are lost, shared, or beyond the budget."""
        taken = [*self._cells.values(), *self._open, *self._free]
        assert sorted(taken) == list(range(self._fresh)), "a cell is lost or in two places"
        assert self.used <= self._budget, "over budget"
