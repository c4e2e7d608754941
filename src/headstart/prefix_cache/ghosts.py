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

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.reuse_model import RequestTraits, ReuseHistory, ReuseStats

ROWS = 256
"""Most rows a bucket, on average. With 16 the ages at which ghosts are dropped differ so much that fewer prompts are found."""
_ROW = struct.Struct("<32sddHHH")  # id, last use, weight, uses, children, class of the request
_ID, _MOST = 32, (1 << 16) - 1

Ghost = tuple[BlockId, ReuseStats]
"""An id, and the history of its entry. What the entry would save is not kept: it is computed when the entry comes again."""


class Ghosts:
    """Histories by id. Each that is returned is a copy."""

    def __init__(self) -> None:
        self._count = 0
        self._buckets = [b""]
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

    def get(self, key: BlockId) -> ReuseStats | None:
        number, at = self._find(key)
        return None if at < 0 else _stats(self._buckets[number], at)

    def pop(self, key: BlockId) -> ReuseStats | None:
        """Removes a ghost."""
        number, at = self._find(key)
        if at < 0:
            return None
        bucket = self._buckets[number]
        self._buckets[number] = bucket[:at] + bucket[at + _ROW.size :]
        self._count -= 1
        return _stats(bucket, at)

    def replace(self, key: BlockId, history: ReuseHistory) -> None:
        """Changes a ghost, which keeps its place."""
        number, at = self._find(key)
        bucket = self._buckets[number]
        self._buckets[number] = bucket[:at] + _row(key, history) + bucket[at + _ROW.size :]

    def put(self, key: BlockId, history: ReuseHistory, most: int) -> list[Ghost]:
        """Adds an id that has no ghost. Returns those that are dropped for it.

        With more than `most` it is one, or two as long as there are too many. It is none if no other is in its bucket.
        """
        number = self._number(key)
        self._buckets[number] += _row(key, history)
        self._count += 1
        dropped: list[Ghost] = []
        while self._count > most and len(self._buckets[number]) > _ROW.size and len(dropped) < 2:
            dropped += _ghosts(self._buckets[number][: _ROW.size])
            self._buckets[number] = self._buckets[number][_ROW.size :]
            self._count -= 1
        if self._count > ROWS * len(self._buckets):
            self._split()
        return dropped

    def clearing(self) -> Iterator[list[Ghost]]:
        """Drops all ghosts, a bucket at a time. Others may come between two pieces; they may be dropped too."""
        number = 0
        while number < len(self._buckets):  # a split moves rows to a later bucket
            gone = list(_ghosts(self._buckets[number]))
            self._buckets[number] = b""
            self._count -= len(gone)
            number += 1
            yield gone

    def _number(self, key: BlockId) -> int:
        """The bucket of an id."""
        number = int.from_bytes(key[:4], "little") & self._mask
        return number if number < len(self._buckets) else number ^ (self._mask + 1 >> 1)

    def _find(self, key: BlockId) -> tuple[int, int]:
        """The bucket of an id, and where its row begins there; -1 if it has none."""
        number = self._number(key)
        bucket, at = self._buckets[number], -1
        while (at := bucket.find(key, at + 1)) >= 0 and at % _ROW.size:
            pass  # these bytes are part of two rows
        return number, at

    def _split(self) -> None:
        """Divides the next bucket between itself and a new one."""
        source = len(self._buckets) ^ (self._mask + 1 >> 1)
        rows = self._buckets[source]
        self._buckets.append(b"")
        if len(self._buckets) > self._mask:
            self._mask = 2 * self._mask + 1
        self._buckets[source] = b""
        for at in range(0, len(rows), _ROW.size):
            row = rows[at : at + _ROW.size]
            self._buckets[self._number(row[:_ID])] += row

    def check(self) -> None:
        """Raises AssertionError if rows are lost, or in the wrong bucket."""
        assert self._count == sum(map(len, self._buckets)) // _ROW.size
        assert len(self._buckets) <= self._mask < 2 * len(self._buckets)
        for number, bucket in enumerate(self._buckets):
            keys = [key for key, _ in _ghosts(bucket)]
            assert len({*keys}) == len(keys)
            assert all(self._number(key) == number for key in keys)


def _row(key: BlockId, history: ReuseHistory) -> bytes:
    traits, uses, children = history.request_traits, history.uses, history.children
    if uses > _MOST or children > _MOST:
        uses, children = min(uses, _MOST), min(children, _MOST)
    return _ROW.pack(key, history.last, traits.weight, uses, children, traits.bucket)


def _stats(bucket: bytes, at: int) -> ReuseStats:
    _, last, weight, uses, children, request_class = _ROW.unpack_from(bucket, at)
    return ReuseStats(0.0, last, uses, RequestTraits(request_class, weight), children)


def _ghosts(rows: bytes) -> Iterator[Ghost]:
    return ((rows[at : at + _ID], _stats(rows, at)) for at in range(0, len(rows), _ROW.size))
