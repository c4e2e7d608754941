"""Ranked leaves: leaves in the order in which they are evicted, at 8 bytes each.

Leaves are sorted by their rank, then by their last use, then by their position (of equals the deeper one first), then by id.

They stand in *runs* of at most `RUN`, so an insertion moves at most one run. A search compares ranks first, and looks at the
rest only where ranks are equal.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Generic, Protocol, TypeAlias, TypeVar

from headstart.interfaces.tokens import BlockId

RUN = 512
"""Most leaves of a run."""
SPARSE = 64
"""Fewest leaves of a run, unless its neighbour is nearly full."""


class Leaf(Protocol):
    """An entry that may be evicted. What decides its place changes only while it is not among `RankedLeaves`."""

    rank: float | None

    @property
    def id(self) -> BlockId: ...

    @property
    def start(self) -> int: ...

    @property
    def last(self) -> float: ...

    @property
    def owner(self) -> bytes: ...


LeafT = TypeVar("LeafT", bound=Leaf)
Place: TypeAlias = "tuple[float, float, int, BlockId] | tuple[()]"
"""What a leaf is sorted by; () comes before all leaves."""


def place_of(leaf: Leaf) -> Place:
    return _rank(leaf), leaf.last, -leaf.start, leaf.id


def _rank(leaf: Leaf) -> float:
    assert leaf.rank is not None, "it is not among the leaves"
    return leaf.rank


_BY_RANK = attrgetter("rank")
"""Of a leaf that has one."""


class RankedLeaves(Generic[LeafT]):
    """Each change costs O(log n). Other threads may iterate: if it changes meanwhile, they may miss a leaf or see it twice."""

    __slots__ = ("_firsts", "_lows", "_runs")

    def __init__(self, leaves: Iterable[LeafT] = ()) -> None:
        found = sorted(leaves, key=place_of)
        half = RUN // 2
        self._runs = [found[first : first + half] for first in range(0, len(found), half)] or [[]]
        self._firsts: list[Place] = [(), *(place_of(run[0]) for run in self._runs[1:])]
        """For each run, a place that is after those of all earlier runs, and not after its own."""
        self._lows = [-math.inf, *(_rank(run[0]) for run in self._runs[1:])]
        """The ranks of these places."""

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def __bool__(self) -> bool:
        return bool(self._runs[0])

    def __iter__(self) -> Iterator[LeafT]:
        for run in self._runs:
            yield from run

    def first(self) -> LeafT | None:
        run = self._runs[0]
        return run[0] if run else None

    def after(self, place: Place, count: int) -> list[LeafT]:
        """The next `count` leaves after a place."""
        number = bisect_right(self._firsts, place) - 1
        run = self._runs[number]
        found = run[bisect_right(run, place, key=place_of) :][:count]
        for run in islice(self._runs, number + 1, None):
            if len(found) >= count:
                break
            found += run[: count - len(found)]
        return found

    def add(self, leaf: LeafT) -> None:
        """Adds a leaf that has a rank."""
        number, index = self._find(leaf)
        run = self._runs[number]
        run.insert(index, leaf)
        if len(run) > RUN:
            half = len(run) // 2
            self._runs.insert(number + 1, run[half:])
            self._firsts.insert(number + 1, place_of(run[half]))
            self._lows.insert(number + 1, _rank(run[half]))
            del run[half:]

    def remove(self, leaf: LeafT) -> None:
        """Removes a leaf whose place is what it was when it was added."""
        run = self._runs[0]
        number, index = (0, 0) if run and run[0] is leaf else self._find(leaf)
        run = self._runs[number]
        assert run[index] is leaf
        del run[index]
        if len(run) < SPARSE and len(self._runs) > 1:
            self._join(number if number else 1)

    def _find(self, leaf: LeafT) -> tuple[int, int]:
        """The run of a leaf, and its place there."""
        rank = _rank(leaf)
        number = bisect_right(self._lows, rank) - 1
        if self._lows[number] == rank:  # leaves of this rank may also be in runs before it
            number = bisect_right(self._firsts, place_of(leaf)) - 1
        run = self._runs[number]
        index = bisect_left(run, rank, key=_BY_RANK)
        if index == len(run) or run[index].rank != rank or run[index] is leaf:
            return number, index
        last = leaf.last
        if last < run[index].last:
            return number, index
        end = bisect_right(run, rank, index, key=_BY_RANK)
        if last > run[end - 1].last:  # most leaves that are added were used last
            return number, end
        return number, bisect_left(run, place_of(leaf), index, end, key=place_of)

    def _join(self, number: int) -> None:
        """Appends a run to the one before it, if they fit into one."""
        before = self._runs[number - 1]
        if len(before) + len(self._runs[number]) <= RUN:
            before += self._runs.pop(number)
            del self._firsts[number], self._lows[number]

    def check(self) -> None:
        """Raises AssertionError if leaves are not in order, or in another run than they should be."""
        places = [place_of(leaf) for leaf in self]
        assert places == sorted(places)
        assert len(set(places)) == len(places)
        assert self._lows == [-math.inf, *(first[0] for first in self._firsts[1:] if first)]
        for run, first, after in zip(self._runs, self._firsts, [*self._firsts[1:], (math.inf,)], strict=True):
            assert all(first <= place_of(leaf) < after for leaf in run)
            assert len(run) <= RUN
            assert run or len(self._runs) == 1
