"""Id map: values by the ids of entries, which can be walked in pieces while the map changes.

A dict cannot: it must be copied as a whole, which takes the interpreter for tens of milliseconds with a million entries. The
values are divided by the first byte of their ids. An id is a hash, so the parts are about equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

from headstart.interfaces.tokens import BlockId

HeldT = TypeVar("HeldT")


class IdMap(Generic[HeldT]):
    """Values by id."""

    __slots__ = ("_count", "_parts")

    def __init__(self) -> None:
        self._count = 0
        self._parts: dict[bytes, dict[BlockId, HeldT]] = {b"": {}, **{bytes([first]): {} for first in range(256)}}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[BlockId]:
        return chain.from_iterable(filter(None, self._parts.values()))

    def __contains__(self, key: BlockId) -> bool:
        return key in self._parts[key[:1]]

    def __getitem__(self, key: BlockId) -> HeldT:
        return self._parts[key[:1]][key]

    def __setitem__(self, key: BlockId, value: HeldT) -> None:
        part = self._parts[key[:1]]
        self._count += key not in part
        part[key] = value

    def __delitem__(self, key: BlockId) -> None:
        del self._parts[key[:1]][key]
        self._count -= 1

    def get(self, key: BlockId) -> HeldT | None:
        return self._parts[key[:1]].get(key)

    def values(self) -> Iterator[HeldT]:
        """All values. The map must not change meanwhile."""
        return chain.from_iterable(map(dict.values, filter(None, self._parts.values())))

    def items(self) -> Iterator[tuple[BlockId, HeldT]]:
        """All ids with their values. The map must not change meanwhile."""
        return chain.from_iterable(map(dict.items, filter(None, self._parts.values())))

    def pieces(self) -> Iterator[list[HeldT]]:
        """All values, in pieces of about a 256th. The map may change between two pieces.

        A value that is there all the time is in exactly one piece. No id is in two.
        """
        for part in self._parts.values():
            if part:
                yield list(part.values())

    def clearing(self) -> Iterator[None]:
        """Drops all values, in such pieces. Nobody else uses the map any more."""
        while self._parts:
            self._parts.popitem()
            yield
