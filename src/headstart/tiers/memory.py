"""Memory tier: cells of two sizes, for KV and for state, within one hard byte budget.

A cell is written first and published afterwards: `allocate` → write into `cell` → `commit`. So bytes are copied once, and
nothing is visible before it is complete. A cell uses memory only after it was written. A free cell keeps its pages for the next
entry of its kind, until another kind or a transient buffer needs the memory.

Which cell a key has is one number (`CellPlaces`). Whoever has an object for each key may keep the number there (`keep_places`):
the table of a million entries takes 75 MB, and the numbers alone 28 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from itertools import chain
from typing import NamedTuple

from headstart.errors import ConfigError
from headstart.interfaces.tier import KV, STATE, EntryKind, Store
from headstart.interfaces.tokens import Bytes
from headstart.names import option
from headstart.prefix_cache.quota import NoQuota, OwnerLimits
from headstart.tiers.arena import Arena


class Cell(NamedTuple):
    """Memory for one entry, from `Memory.allocate`. It counts towards the quota of `owner`."""

    kind: EntryKind
    number: int
    owner: bytes = b""


CellPlaces = MutableMapping[bytes, int]
"""The cells of published keys: twice the cell's number, and 1 more for state."""


class Memory(Store):
    """Cells of `cell_bytes` for KV and of `state_bytes` for state. Cells of 0 bytes always fit.

    Args:
        cell_bytes: size of a cell for KV.
        budget: bytes for all cells and claimed transient buffers together.
        state_bytes: size of a cell for state.
        quota: counts the bytes of each owner here. The caller asks it whose entries to evict.

    Raises:
        ConfigError: the system cannot reserve so much address space.
    """

    name = "memory"

    def __init__(self, cell_bytes: int, budget: int, state_bytes: int = 0, quota: OwnerLimits | None = None) -> None:
        self.cell_bytes = cell_bytes
        self.state_bytes = state_bytes
        self.quota = NoQuota() if quota is None else quota
        self._budget = budget
        self._claimed = 0
        self._closed = False
        self._places: CellPlaces = {}
        self._sizes: dict[int, int] = {}  # of content that does not fill its cell, by place
        self._owners: dict[int, bytes] = {}  # by place, where there are quotas
        self._open: set[Cell] = set()
        try:
            self._arenas: dict[EntryKind, Arena] = {KV: Arena(cell_bytes, budget), STATE: Arena(state_bytes, budget)}
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(f"Cannot reserve {budget} bytes of memory ({error}); lower {option('memory_budget')}.") from error

    def keep_places(self, places: CellPlaces) -> None:
        """Keeps the cells of keys in `places`, which is empty. For a memory that is empty too."""
        assert not self._places
        self._places = places

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def closed(self) -> bool:
        """Whether all memory was returned, so that nothing can be read any more."""
        return self._closed

    @property
    def used(self) -> int:
        return sum(arena.held * arena.size for arena in self._arenas.values()) + self._claimed

    @property
    def over(self) -> bool:
        """Whether cells and claimed bytes exceed the budget, which is possible after `claim`. Then evict."""
        return self.used > self._budget

    def size(self, kind: EntryKind) -> int:
        """Bytes of a cell."""
        return self._arenas[kind].size

    def fits(self, kind: EntryKind = KV) -> bool:
        """Whether one more cell of a kind can be allocated without evicting."""
        size = self._arenas[kind].size
        return not self._closed and (not size or self.used + size <= self._budget)

    def claim(self, transient: int) -> None:
        """Reserves `transient` bytes of the budget for buffers elsewhere, instead of the earlier reservation."""
        self._claimed = transient
        self._shrink(0)

    def _shrink(self, need: int) -> None:
        """Returns pages of free cells until `need` bytes of the budget are available, or no free cell has pages."""
        arenas = self._arenas.values()
        while sum(arena.touched for arena in arenas) + self._claimed + need > self._budget:
            if not any(arena.shrink() for arena in arenas):
                return

    def allocate(self, kind: EntryKind = KV, owner: bytes = b"") -> Cell | None:
        """A cell to write into; None if the budget is used up. `commit` or `release` must follow."""
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
        """Publishes the first `size` bytes of an allocated cell (or all) under `key`, replacing an earlier cell."""
        self._open.remove(cell)
        old, place = self._places.get(key), 2 * cell.number + (cell.kind == STATE)
        self._places[key] = place
        if size is not None and size != self._arenas[cell.kind].size:
            self._sizes[place] = size
        if self.quota.on:
            self._owners[place] = cell.owner
        if old is not None:
            self._give(self._leave(old))

    def release(self, cell: Cell) -> None:
        """Frees an allocated cell without publishing it."""
        self._open.remove(cell)
        self._give(cell)

    def _give(self, cell: Cell) -> None:
        arena = self._arenas[cell.kind]
        arena.give(cell.number)
        self.quota.hold(cell.owner, -arena.size)
        self._shrink(0)

    def _at(self, place: int) -> Cell:
        return Cell(STATE if place & 1 else KV, place >> 1, self._owners.get(place, b""))

    def _leave(self, place: int) -> Cell:
        """The cell of a place whose key has another one now, or none."""
        cell = self._at(place)
        self._sizes.pop(place, None)
        self._owners.pop(place, None)
        return cell

    def read(self, key: bytes) -> Bytes | None:
        """A view of the content under `key`, valid until `delete`; None if there is none."""
        place = self._places.get(key)
        return None if place is None else self.cell(self._at(place))[: self._sizes.get(place)]

    def delete(self, key: bytes) -> None:
        """Frees the cell under `key`. A missing key is no error."""
        place = self._places.pop(key, None)
        if place is not None:
            self._give(self._leave(place))

    def __iter__(self) -> Iterator[bytes]:
        """The keys of all published cells."""
        return iter(list(self._places))

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def cells(self) -> Iterator[Cell]:
        """All cells that are in use: published, or allocated only."""
        return chain(map(self._at, self._places.values()), self._open)

    def close(self) -> None:
        """Returns all memory. Afterwards the tier is empty and accepts nothing."""
        self._closed = True
        self._places = {}
        self._sizes.clear()
        self._owners.clear()
        self._open.clear()
        self._budget = self._claimed = 0
        for arena in self._arenas.values():
            arena.clear()

    def check(self) -> None:
        """Raises AssertionError if cells are lost, shared, or exceed the budget."""
        published = list(self._places.values())
        places = set(published)
        assert self._sizes.keys() <= places
        assert self._owners.keys() == (places if self.quota.on else set())
        for kind, arena in self._arenas.items():
            held = [place >> 1 for place in published if place & 1 == (kind == STATE)]
            arena.check(held + [cell.number for cell in self._open if cell.kind == kind])
        assert not self.over, "over budget"
        assert sum(arena.touched for arena in self._arenas.values()) + self._claimed <= self._budget, "pages beyond the budget"
