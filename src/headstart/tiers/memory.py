"""Memory tier: cells of two sizes, for rows and for state, in anonymous memory under one hard byte budget.

Cells are written in place and published afterwards (`allocate` → write `cell` → `commit`), so that bytes are copied once
and nothing is visible before it is complete. Cells are virtual until touched. Free ones keep their pages for the next of their
kind, unless cells of the other kind, or buffers for which budget is claimed, need the room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headstart.errors import ConfigError
from headstart.interfaces.tier import EntryKind, Store
from headstart.interfaces.tokens import Bytes
from headstart.names import option
from headstart.prefix_cache.quota import NoQuota, OwnerLimits
from headstart.tiers.arena import Arena


@dataclass(frozen=True, slots=True)
class Cell:
    """Room for one object, as `Memory.allocate` gives it; `owner` is whose quota it counts towards."""

    kind: EntryKind
    number: int
    owner: bytes = b""


class Memory(Store):
    """A store of cells of `cell_bytes` for rows, and of `state_bytes` for state. Cells of no bytes always fit.

    Args:
        cell_bytes: size of a cell for rows.
        budget: bytes for all cells and claimed transient buffers together.
        state_bytes: size of a cell for state.
        quota: is told who holds how many bytes; who goes first is for others to ask it.

    Raises:
        ConfigError: the system refuses to reserve that much address space.
    """

    name = "memory"

    def __init__(self, cell_bytes: int, budget: int, state_bytes: int = 0, quota: OwnerLimits | None = None) -> None:
        self.cell_bytes = cell_bytes
        self.state_bytes = state_bytes
        self.quota = NoQuota() if quota is None else quota
        self._budget = budget
        self._claimed = 0
        self._closed = False
        self._cells: dict[bytes, tuple[Cell, int]] = {}  # with the bytes that are content
        self._open: set[Cell] = set()
        try:
            self._arenas: dict[EntryKind, Arena] = {"rows": Arena(cell_bytes, budget), "state": Arena(state_bytes, budget)}
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(f"Cannot reserve {budget} bytes of memory ({error}); lower {option('memory_budget')}.") from error

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def used(self) -> int:
        return sum(arena.held * arena.size for arena in self._arenas.values()) + self._claimed

    @property
    def over(self) -> bool:
        """Whether cells and claim together exceed the budget, as they may after `claim`: then evict."""
        return self.used > self._budget

    def size(self, kind: EntryKind) -> int:
        """Bytes of a cell."""
        return self._arenas[kind].size

    def fits(self, kind: EntryKind = "rows") -> bool:
        """Whether one more cell of that kind can be allocated now, without evicting."""
        size = self._arenas[kind].size
        return not self._closed and (not size or self.used + size <= self._budget)

    def claim(self, transient: int) -> None:
        """Sets aside `transient` bytes of the budget for buffers elsewhere, in place of what was claimed before."""
        self._claimed = transient
        self._shrink(0)

    def _shrink(self, need: int) -> None:
        """Gives pages of free cells back until what is touched leaves `need` bytes of the budget, or none is left."""
        arenas = self._arenas.values()
        while sum(arena.touched for arena in arenas) + self._claimed + need > self._budget:
            if not any(arena.shrink() for arena in arenas):
                return

    def allocate(self, kind: EntryKind = "rows", owner: bytes = b"") -> Cell | None:
        """A cell to write into; None if the budget is used up. End with `commit` or `release`."""
        if not self.fits(kind):
            return None
        arena = self._arenas[kind]
        self._shrink(arena.grows)
        cell = Cell(kind, arena.take(), owner)
        self.quota.hold(owner, arena.size)
        self._open.add(cell)
        return cell

    def cell(self, cell: Cell) -> Bytes:
        """All bytes of a cell."""
        return self._arenas[cell.kind].bytes(cell.number)

    def commit(self, key: bytes, cell: Cell, size: int | None = None) -> None:
        """Publishes an allocated cell under `key`, in place of what was there: its first `size` bytes, or all."""
        self._open.remove(cell)
        old = self._cells.get(key)
        self._cells[key] = cell, self._arenas[cell.kind].size if size is None else size
        if old is not None:
            self._give(old[0])

    def release(self, cell: Cell) -> None:
        """Gives an allocated cell back unpublished."""
        self._open.remove(cell)
        self._give(cell)

    def _give(self, cell: Cell) -> None:
        arena = self._arenas[cell.kind]
        arena.give(cell.number)
        self.quota.hold(cell.owner, -arena.size)
        self._shrink(0)

    def read(self, key: bytes) -> Bytes | None:
        """A view of the content under `key`, valid until its `delete`; None if it is not here."""
        found = self._cells.get(key)
        return None if found is None else self.cell(found[0])[: found[1]]

    def delete(self, key: bytes) -> None:
        found = self._cells.pop(key, None)
        if found is not None:
            self._give(found[0])

    def __iter__(self) -> Iterator[bytes]:
        """The keys of all that it holds now."""
        return iter(list(self._cells))

    def __contains__(self, key: bytes) -> bool:
        return key in self._cells

    def __len__(self) -> int:
        return len(self._cells)

    def close(self) -> None:
        """Gives all memory back. Afterwards there is nothing in it, and nothing may be put in."""
        self._closed = True
        self._cells.clear()
        self._open.clear()
        self._budget = self._claimed = 0
        for arena in self._arenas.values():
            arena.clear()

    def check(self) -> None:
        """Raises AssertionError if cells are lost, shared, or beyond the budget."""
        held = [*(cell for cell, _ in self._cells.values()), *self._open]
        for kind, arena in self._arenas.items():
            arena.check([cell.number for cell in held if cell.kind == kind])
        assert not self.over, "over budget"
        assert sum(arena.touched for arena in self._arenas.values()) + self._claimed <= self._budget, "pages beyond the budget"
