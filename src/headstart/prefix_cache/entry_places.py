"""Entry places: where entries are in memory. A mapping from their ids to numbers of cells.

The numbers stand in the entries, because a second map of all ids would take more memory.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, ValuesView
from typing import Any

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.index import Index


class EntryPlaces(MutableMapping[BlockId, int]):
    """The cells of entries in memory, in the entries themselves. Only an entry of the index can have one."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._count = 0

    def __getitem__(self, key: BlockId) -> int:
        entry = self._index.get(key)
        if entry is None or (place := entry.cell) is None:
            raise KeyError(key)
        return place

    def get(self, key: BlockId, default: Any = None) -> Any:
        entry = self._index.get(key)
        return default if entry is None or (place := entry.cell) is None else place

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self.get(key) is not None

    def __setitem__(self, key: BlockId, place: int) -> None:
        entry = self._index.get(key)
        if entry is None:
            raise KeyError(key)
        self._count += entry.cell is None
        entry.cell = place

    def __delitem__(self, key: BlockId) -> None:
        entry = self._index.get(key)
        if entry is None or entry.cell is None:
            raise KeyError(key)
        entry.cell = None
        self._count -= 1

    def __iter__(self) -> Iterator[BlockId]:
        return (entry.id for entry in self._index if entry.cell is not None)

    def values(self) -> ValuesView[int]:
        return _Cells(self)

    def cells(self) -> Iterator[int]:
        return (place for entry in self._index if (place := entry.cell) is not None)

    def __len__(self) -> int:
        return self._count


class _Cells(ValuesView[int]):
    """All cells, without a search for each."""

    _mapping: EntryPlaces

    def __iter__(self) -> Iterator[int]:
        return self._mapping.cells()
