"""Id map: values by the ids of entries, which grows without a pause and can be walked in pieces while it changes.

A dict cannot: it grows as a whole and must be copied as a whole, which takes the interpreter for tens of milliseconds with a
million entries. So the values stand in several dicts. Each of them has a range of the first bytes of ids, and one that gets
too large is divided in the middle of its range, as in extendible hashing (Fagin et al., 1979). An id is a hash, so the dicts
are about equal. There are no more than needed: 256 small ones would take 60 bytes more for each of 1,000 values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

from headstart.interfaces.tokens import BlockId

HeldT = TypeVar("HeldT")

LARGE, SPREAD = 2_560, 768
"""A dict of more than one first byte is divided when it has at most so many values, which takes two milliseconds; some are
divided up to `SPREAD` values earlier. All are about equal, so they would be divided at once otherwise, and the collector would
look at all that is new in one pass."""
PIECE = 256
"""Most values of a piece."""
_FIRSTS = (b"", *(bytes([first]) for first in range(256)))


class IdMap(Generic[HeldT]):
    """Values by id."""

    __slots__ = ("_count", "_different", "_limits", "_parts")

    def __init__(self) -> None:
        self._count = 0
        whole: dict[BlockId, HeldT] = {}
        # By first byte. Neighbours may share a dict: those of a range.
        self._parts = dict.fromkeys(_FIRSTS, whole)
        self._limits = dict.fromkeys(_FIRSTS, LARGE)  # by first byte: with how many values its dict is divided
        self._different = [whole]  # each dict once, in order. It is replaced when one is divided

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[BlockId]:
        return chain.from_iterable(self._different)

    def __contains__(self, key: BlockId) -> bool:
        return key in self._parts[key[:1]]

    def __getitem__(self, key: BlockId) -> HeldT:
        return self._parts[key[:1]][key]

    def __setitem__(self, key: BlockId, value: HeldT) -> None:
        byte = key[:1]
        part = self._parts[byte]
        self._count += key not in part
        part[key] = value
        if len(part) >= self._limits[byte]:
            self._divide(part, key[0] + 1 if key else 0)

    def __delitem__(self, key: BlockId) -> None:
        del self._parts[key[:1]][key]
        self._count -= 1

    def get(self, key: BlockId) -> HeldT | None:
        return self._parts[key[:1]].get(key)

    def values(self) -> Iterator[HeldT]:
        """All values. The map must not change meanwhile."""
        return chain.from_iterable(map(dict.values, self._different))

    def items(self) -> Iterator[tuple[BlockId, HeldT]]:
        """All ids with their values. The map must not change meanwhile."""
        return chain.from_iterable(map(dict.items, self._different))

    def pieces(self) -> Iterator[list[HeldT]]:
        """All values, in pieces of at most `PIECE`. The map may change between two pieces.

        A value that is there all the time is in exactly one piece. No id is in two, and a piece has only what is there when it
        comes.
        """
        at = 0
        while at < len(_FIRSTS):
            part = self._parts[_FIRSTS[at]]
            at = self._end(part, at)  # as the range is now: what comes into it later is not walked
            keys = list(part)
            for first in range(0, len(keys), PIECE):
                found = ((key, self._parts[key[:1]]) for key in keys[first : first + PIECE])
                if piece := [held[key] for key, held in found if key in held]:
                    yield piece

    def clearing(self) -> Iterator[None]:
        """Drops all values, in such pieces. Nobody else uses the map any more."""
        for part in self._different:
            while part:
                for _ in range(min(PIECE, len(part))):
                    part.popitem()
                yield
        self._count = 0

    def _end(self, part: dict[BlockId, HeldT], at: int) -> int:
        """Where the range of first bytes that a dict has ends, if `at` is in it."""
        while at < len(_FIRSTS) and self._parts[_FIRSTS[at]] is part:
            at += 1
        return at

    def _divide(self, part: dict[BlockId, HeldT], at: int) -> None:
        """Gives a dict's values to two, by the middle of its range, in which `at` is. One of a single byte stays."""
        first, end = at, self._end(part, at)
        while first and self._parts[_FIRSTS[first - 1]] is part:
            first -= 1
        if end - first == 1:
            self._limits[_FIRSTS[first]] = sys.maxsize
            return
        middle = (first + end) // 2
        lower: dict[BlockId, HeldT] = {}
        upper: dict[BlockId, HeldT] = {}
        self._parts.update(dict.fromkeys(_FIRSTS[first:middle], lower))
        self._parts.update(dict.fromkeys(_FIRSTS[middle:end], upper))
        self._limits.update(dict.fromkeys(_FIRSTS[first:middle], _limit(first)))
        self._limits.update(dict.fromkeys(_FIRSTS[middle:end], _limit(middle)))
        at = next(number for number, one in enumerate(self._different) if one is part)
        self._different = [*self._different[:at], lower, upper, *self._different[at + 1 :]]
        for key, value in part.items():
            self._parts[key[:1]][key] = value


def _limit(first: int) -> int:
    """Of the dict whose range begins with a first byte. Those of neighbours are far from each other."""
    return LARGE - first * 159 % 256 * SPREAD // 256
