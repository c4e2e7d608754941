"""Ghosts: how entries were used that are no longer in memory, at about 60 bytes each.

There may be half as many ghosts as entries, so each is a row of bytes and no object. Rows stand in *buckets* of about 200,
by their ids, the oldest first. When there are more rows than `ROWS` for each bucket, one bucket is split in two (linear
hashing; Litwin, 1980), so no call moves more than one bucket.

If there are too many, the oldest row of the bucket that grows is dropped. An id is a hash, so all buckets grow alike: a ghost
is dropped when about as many came after it as there may be.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.reuse_model import Histories, RequestTraits, ReuseHistory, ReuseStats

ROWS = 256
"""Most rows a bucket, on average. With 16 the ages at which ghosts are dropped differ so much that fewer prompts are found."""
TOGETHER = 64
"""Buckets whose histories are read at once, which takes 0.3 ms."""
_ROW = struct.Struct("<32sddHHH")  # id, last use, weight, uses, children, class of the request
_COLUMNS = np.dtype(
    [("head", ">u4"), ("id", "V28"), ("last", "<f8"), ("weight", "<f8"), ("uses", "<u2"), ("_", "<u2"), ("bucket", "<u2")]
)
_ID, _MOST = 32, (1 << 16) - 1

Ghost = tuple[BlockId, ReuseStats]
"""An id, and the history of its entry. What the entry would save is not kept: it is computed when the entry comes again."""


class Ghosts:
    """Histories by id. Each that is returned is a copy.

    Beside the rows of a bucket stand their *tags*: the last byte of each id. A search passes over tags, and compares an id only
    where they are equal.
    """

    def __init__(self) -> None:
        self._count = 0
        self._tags, self._buckets = [bytearray()], [bytearray()]
        self._mask = 1  # the least 2^n - 1 that is not below the number of buckets

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[BlockId]:
        return (key for key, _ in self.items())

    def __contains__(self, key: BlockId) -> bool:
        return self._find(key)[1] >= 0

    def items(self) -> Iterator[Ghost]:
        """All ghosts. They must not change meanwhile."""
        return (ghost for bucket in self._buckets for ghost in _ghosts(bucket))

    def sampled(self, weight: int) -> Iterator[Histories]:
        """The histories of those that belong to a sample of one of `weight` (`reuse_sample`), in pieces. Their weights are
        those of all. The ghosts may change between two pieces.
        """
        for first in range(0, len(self._buckets), TOGETHER):
            rows = np.frombuffer(b"".join(self._buckets[first : first + TOGETHER]), _COLUMNS)
            rows = rows[rows["head"] < (1 << 32) / weight]
            yield Histories(rows["last"], rows["uses"], rows["bucket"], rows["weight"] * weight)

    def get(self, key: BlockId) -> ReuseStats | None:
        number, row = self._find(key)
        return None if row < 0 else _stats(self._buckets[number], row * _ROW.size)

    def pop(self, key: BlockId) -> ReuseStats | None:
        """Removes a ghost."""
        number, row = self._find(key)
        if row < 0:
            return None
        found = _stats(self._buckets[number], row * _ROW.size)
        self._drop(number, row)
        return found

    def replace(self, key: BlockId, history: ReuseHistory) -> None:
        """Changes a ghost, which keeps its place."""
        number, row = self._find(key)
        self._buckets[number][row * _ROW.size : (row + 1) * _ROW.size] = _row(key, history)

    def put(self, key: BlockId, history: ReuseHistory, most: int) -> list[Ghost]:
        """Adds an id that has no ghost. Returns those that are dropped for it.

        With more than `most` it is one, or two as long as there are too many. It is none if no other is in its bucket.
        """
        number = self._number(key)
        tags, rows = self._tags[number], self._buckets[number]
        tags.append(key[-1])
        rows += _row(key, history)
        self._count += 1
        dropped: list[Ghost] = []
        while self._count > most and len(tags) > 1 and len(dropped) < 2:
            dropped.append((bytes(rows[:_ID]), _stats(rows, 0)))
            self._drop(number, 0)
        if self._count > ROWS * len(self._buckets):
            self._split()
        return dropped

    def clearing(self) -> Iterator[list[Ghost]]:
        """Drops all ghosts, a bucket at a time. Others may come between two pieces; they may be dropped too."""
        number = 0
        while number < len(self._buckets):  # a split moves rows to a later bucket
            gone = list(_ghosts(self._buckets[number]))
            self._tags[number], self._buckets[number] = bytearray(), bytearray()
            self._count -= len(gone)
            number += 1
            yield gone

    def _number(self, key: BlockId) -> int:
        """The bucket of an id."""
        number = int.from_bytes(key[:4], "little") & self._mask
        return number if number < len(self._buckets) else number ^ (self._mask + 1 >> 1)

    def _find(self, key: BlockId) -> tuple[int, int]:
        """The bucket of an id, and the number of its row there; -1 if it has none."""
        number, tag = self._number(key), key[-1]
        tags, rows = self._tags[number], self._buckets[number]
        row = tags.find(tag)
        while row >= 0 and not rows.startswith(key, row * _ROW.size):
            row = tags.find(tag, row + 1)
        return number, row

    def _drop(self, number: int, row: int) -> None:
        del self._tags[number][row]
        del self._buckets[number][row * _ROW.size : (row + 1) * _ROW.size]
        self._count -= 1

    def _split(self) -> None:
        """Divides the next bucket between itself and a new one."""
        source, new = len(self._buckets) ^ (self._mask + 1 >> 1), len(self._buckets)
        tags, rows = self._tags[source], bytes(self._buckets[source])
        self._tags.append(bytearray())
        self._buckets.append(bytearray())
        if len(self._buckets) > self._mask:
            self._mask = 2 * self._mask + 1
        self._tags[source], self._buckets[source] = bytearray(), bytearray()
        for tag, at in zip(tags, range(0, len(rows), _ROW.size), strict=True):
            row = rows[at : at + _ROW.size]
            place = new if self._number(row) == new else source
            self._tags[place].append(tag)
            self._buckets[place] += row

    def check(self) -> None:
        """Raises AssertionError if rows are lost, in the wrong bucket, or have another's tag."""
        assert self._count == sum(map(len, self._buckets)) // _ROW.size
        assert len(self._buckets) == len(self._tags) <= self._mask < 2 * len(self._buckets)
        for number, (tags, bucket) in enumerate(zip(self._tags, self._buckets, strict=True)):
            keys = [key for key, _ in _ghosts(bucket)]
            assert len({*keys}) == len(keys)
            assert all(self._number(key) == number for key in keys)
            assert tags == bytes(key[-1] for key in keys)


def _row(key: BlockId, history: ReuseHistory) -> bytes:
    traits, uses, children = history.request_traits, history.uses, history.children
    if uses > _MOST or children > _MOST:
        uses, children = min(uses, _MOST), min(children, _MOST)
    return _ROW.pack(key, history.last, traits.weight, uses, children, traits.bucket)


def _stats(bucket: bytearray, at: int) -> ReuseStats:
    _, last, weight, uses, children, request_class = _ROW.unpack_from(bucket, at)
    return ReuseStats(0.0, last, uses, RequestTraits(request_class, weight), children)


def _ghosts(rows: bytearray) -> Iterator[Ghost]:
    return ((bytes(rows[at : at + _ID]), _stats(rows, at)) for at in range(0, len(rows), _ROW.size))
