"""Id map: values by the ids of entries, which can be walked in pieces while the map changes.

A dict cannot: it must be copied as a whole, which takes the interpreter for tens of milliseconds with a million entries. So
the values are divided by the first byte of their ids, once there are many. An id is a hash, so the parts are about equal. Few
values stand in one dict: 256 small ones would take 60 bytes more for each of 1,000.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

from headstart.interfaces.tokens import BlockId

HeldT = TypeVar("HeldT")

FEW = 16_384
"""Most values that stand in one dict. To divide them takes two milliseconds, once."""
PIECE = 256
"""Most values of a piece while there are few."""
_FIRSTS = (b"", *(bytes([first]) for first in range(256)))


class IdMap(Generic[HeldT]):
    """Values by id."""

    __slots__ = ("_count", "_parts", "_whole")

    def __init__(self) -> None:
        self._count = 0
        self._whole: dict[BlockId, HeldT] | None = {}  # of all parts, as long as there are few values
        self._parts: dict[bytes, dict[BlockId, HeldT]] = dict.fromkeys(_FIRSTS, self._whole)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[BlockId]:
        return chain.from_iterable(self._different())

    def __contains__(self, key: BlockId) -> bool:
        return key in self._parts[key[:1]]

    def __getitem__(self, key: BlockId) -> HeldT:
        return self._parts[key[:1]][key]

    def __setitem__(self, key: BlockId, value: HeldT) -> None:
        part = self._parts[key[:1]]
        self._count += key not in part
        part[key] = value
        if self._count > FEW and self._whole is not None:
            self._divide(self._whole)

    def __delitem__(self, key: BlockId) -> None:
        del self._parts[key[:1]][key]
        self._count -= 1

    def get(self, key: BlockId) -> HeldT | None:
        return self._parts[key[:1]].get(key)

    def values(self) -> Iterator[HeldT]:
        """All values. The map must not change meanwhile."""
        return chain.from_iterable(map(dict.values, self._different()))

    def items(self) -> Iterator[tuple[BlockId, HeldT]]:
        """All ids with their values. The map must not change meanwhile."""
        return chain.from_iterable(map(dict.items, self._different()))

    def pieces(self) -> Iterator[list[HeldT]]:
        """All values, in pieces: of `PIECE`, or of about a 256th. The map may change between two pieces.

        A value that is there all the time is in exactly one piece. No id is in two, and a piece has only what is there when it
        comes.
        """
        if self._whole is not None:
            keys = list(self._whole)
            for first in range(0, len(keys), PIECE):
                found = ((key, self._parts[key[:1]]) for key in keys[first : first + PIECE])
                if piece := [part[key] for key, part in found if key in part]:
                    yield piece
            return
        for part in self._parts.values():
            if part:
                yield list(part.values())

    def clearing(self) -> Iterator[None]:
        """Drops all values, in such pieces. Nobody else uses the map any more."""
        while self._whole:
            for _ in range(min(PIECE, len(self._whole))):
                self._whole.popitem()
            yield
        self._whole = None
        while self._parts:
            self._parts.popitem()
            yield

    def _different(self) -> Iterator[dict[BlockId, HeldT]]:
        return iter(self._parts.values() if self._whole is None else (self._whole,))

    def _divide(self, whole: dict[BlockId, HeldT]) -> None:
        """Gives each first byte a dict of its own."""
        parts = {first: dict[BlockId, HeldT]() for first in _FIRSTS}
        for key, value in whole.items():
            parts[key[:1]][key] = value
        self._parts, self._whole = parts, None
