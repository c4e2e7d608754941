"""Arena: cells of equal size in anonymous memory. A cell uses memory only after it was written, and can be returned to the
system alone.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from headstart.interfaces.tokens import Bytes

# Shared mappings, Python's default, get no huge pages: the first touch of each byte then costs ten times as much.
_PRIVATE = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)} if hasattr(mmap, "MAP_PRIVATE") else {}
)


class Arena:
    """Cells of `size` bytes each, by number. Cells of 0 bytes cost nothing, and their number is not limited.

    Args:
        size: bytes of a cell.
        most: most bytes of all cells together.

    Raises:
        OSError, OverflowError, ValueError: the system cannot reserve so much address space.

    Attributes:
        held: cells in use.
    """

    def __init__(self, size: int, most: int) -> None:
        self.size = size
        self.held = 0
        self._fresh = 0  # the first cell that was never taken
        self._warm: list[int] = []  # free cells that have their pages
        self._cold: list[int] = []  # free cells that have not
        self._map = mmap.mmap(-1, max(1, most // size * size if size else 0), **_PRIVATE)
        self._huge = True
        self._advise("MADV_HUGEPAGE")
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def touched(self) -> int:
        """Bytes in memory: cells in use, and free cells whose pages were not returned."""
        return (self.held + len(self._warm)) * self.size

    @property
    def grows(self) -> int:
        """Bytes by which `touched` grows when a cell is taken."""
        return 0 if self._warm else self.size

    def take(self) -> int:
        """A free cell. The caller checks the budget."""
        self.held += 1
        if self._warm:
            return self._warm.pop()
        if self._cold:
            return self._cold.pop()
        self._fresh += 1
        return self._fresh - 1

    def give(self, cell: int) -> None:
        """Frees a cell. Its pages stay until `shrink`."""
        self.held -= 1
        self._warm.append(cell)

    def shrink(self) -> bool:
        """Returns the pages of one free cell to the system. False if no free cell has pages."""
        if not self._warm or not self.size:
            return False
        cell = self._warm.pop()
        self._cold.append(cell)
        first = -(-cell * self.size // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (cell + 1) * self.size // mmap.PAGESIZE * mmap.PAGESIZE - first
        if self._huge:
            self._huge = False
            self._advise("MADV_NOHUGEPAGE")  # the system would refill huge pages that have become partly free
        if size > 0:
            self._advise("MADV_DONTNEED", first, size)
        return True

    def bytes(self, cell: int) -> Bytes:
        """All bytes of a cell."""
        return self._bytes[cell * self.size : (cell + 1) * self.size]

    def clear(self) -> None:
        """Frees all cells and returns all pages. Views stay valid and read zeros."""
        self.held = self._fresh = 0
        self._warm.clear()
        self._cold.clear()
        self._advise("MADV_DONTNEED")

    def check(self, held: list[int]) -> None:
        """Raises AssertionError unless every cell that was ever taken is either in `held` or free."""
        assert len(held) == self.held, "cells are taken by nobody"
        assert sorted([*held, *self._warm, *self._cold]) == list(range(self._fresh)), "a cell is lost or in two places"
        assert self._fresh * self.size <= len(self._bytes) or not self.size, "a cell beyond the end"

    def _advise(self, advice: str, *span: int) -> None:
        if (known := getattr(mmap, advice, None)) is not None:
            with suppress(OSError):  # it is only advice, and not every system takes it
                self._map.madvise(known, *span)
