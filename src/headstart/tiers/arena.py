"""Arena: equal cells of anonymous memory, which is virtual until touched and can be given back cell by cell."""

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
    """Cells of `size` bytes each, by number. Those of no bytes cost nothing, and there are as many as are taken.

    Args:
        size: bytes of a cell.
        most: bytes of all cells together, at most.

    Raises:
        OSError, OverflowError, ValueError: the system refuses to reserve that much address space.

    Attributes:
        held: cells that are taken.
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
        """Bytes that the cells occupy, counting those that are free and have their pages."""
        return (self.held + len(self._warm)) * self.size

    @property
    def grows(self) -> int:
        """Bytes by which taking a cell makes it grow."""
        return 0 if self._warm else self.size

    def take(self) -> int:
        """A cell; whoever takes one sees to it that there is room."""
        self.held += 1
        if self._warm:
            return self._warm.pop()
        if self._cold:
            return self._cold.pop()
        self._fresh += 1
        return self._fresh - 1

    def give(self, cell: int) -> None:
        """Frees a cell, which keeps its pages until `shrink`."""
        self.held -= 1
        self._warm.append(cell)

    def shrink(self) -> bool:
        """Gives the pages of one free cell back to the system; False if no free cell has any."""
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
        """Frees all cells, and gives all pages back. Views of them stay valid, and read zeros."""
        self.held = self._fresh = 0
        self._warm.clear()
        self._cold.clear()
        self._advise("MADV_DONTNEED")

    def check(self, held: list[int]) -> None:
        """Raises AssertionError unless all cells that were ever taken are in `held` or free, once."""
        assert len(held) == self.held, "cells are taken by nobody"
        assert sorted([*held, *self._warm, *self._cold]) == list(range(self._fresh)), "a cell is lost or in two places"
        assert self._fresh * self.size <= len(self._bytes) or not self.size, "a cell beyond the end"

    def _advise(self, advice: str, *span: int) -> None:
        if (known := getattr(mmap, advice, None)) is not None:
            with suppress(OSError):  # it is only advice, and not every system takes it
                self._map.madvise(known, *span)
