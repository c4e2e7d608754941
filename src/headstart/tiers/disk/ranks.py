"""Ranks: the order in which objects leave the disk. It is that of `prefix_cache/eviction_order`, at a cost that does not grow.

Each row has its rank, so the next objects to evict are the first rows of an index. A rank changes with time, so each eviction
renews some: a *hand* goes round the table, `PER_VICTIM` rows for each evicted one, at least `LEAST`, and renews the ranks of
those that nothing follows. None of these is older than the time in which a `PER_VICTIM`th of the objects was evicted (what
loses its last child gets a new one at once). In a table of up to `LEAST` rows, all of them are new.

For one thread at a time. All methods raise sqlite3.Error. Times are in seconds since 1970.
"""

from __future__ import annotations

import math
import random
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from headstart.interfaces.tier import KV
from headstart.prefix_cache.quota import OwnerLimits
from headstart.prefix_cache.reuse_model import KINDS, MEMORY, OCTAVES, REQUEST_BUCKETS, RequestTraits, ReuseModel, ReuseStats
from headstart.tiers.disk import schema

WAIT = 3600.0
"""Seconds for which KV may wait for a checkpoint after it, in models where it is useless without one."""
PER_VICTIM = 16
LEAST = 128
TOGETHER = 256
"""Most keys of one query."""
SAMPLE = 1024
"""Most objects, and most ghosts, whose open intervals are looked at when the rates are computed again."""
_RANGES = 32
"""Places in the table from which a sample is taken."""
_GROWTH = 16
"""The rates are computed again when there were events for a sixteenth of the objects."""

USED = "used, uses, bucket, weight"
_RANKED = f"fingerprint, kind, seconds, allocated, {USED}"
_LEAF = "rank, used, -start, key, owner, parent, allocated"


class _Leaf(NamedTuple):
    """An object that may be evicted. They are in order."""

    rank: float
    last: float
    depth: int
    key: bytes
    owner: bytes
    parent: bytes
    size: int


class _Queue:
    """Leaves, the lowest first: those of a sorted query, and those that are pushed. Those in `taken` are left out."""

    def __init__(self, rows: Iterator[Sequence[Any]], taken: Collection[bytes]) -> None:
        self._rows = map(_Leaf._make, rows)
        self._next = next(self._rows, None)
        self._pushed: list[_Leaf] = []
        self._taken = taken

    def push(self, leaf: _Leaf) -> None:
        heappush(self._pushed, leaf)

    def first(self) -> _Leaf | None:
        while self._next is not None and self._next.key in self._taken:
            self._next = next(self._rows, None)
        while self._pushed and self._pushed[0].key in self._taken:
            heappop(self._pushed)
        return min((leaf for leaf in (self._next, *self._pushed[:1]) if leaf is not None), default=None)


class Ranks:
    """The ranks in a catalogue, and the model of reuse that they come from."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database
        self._reuse = ReuseModel()
        self._news: float = math.inf  # events since the rates were computed
        self._with_state: frozenset[bytes] = frozenset()

    # ── what is learned ──────────────────────────────────────────────────────────────────────────────────────────────

    def count(self, row: int, intervals: Iterable[tuple[ReuseStats, float]]) -> None:
        """Counts intervals of reuse, each with its end. `row`: 0 if they ended with a use, 1 if they are no longer watched."""
        weights: dict[tuple[int, int], float] = {}
        for stats, now in intervals:
            place = stats.kind, stats.age(now)
            weights[place] = weights.get(place, 0.0) + stats.request_traits.weight
            self._news += 1
        self._db.executemany(
            "INSERT INTO intervals (row, kind, octave, count) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (row, kind, octave) DO UPDATE SET count = count + excluded.count",
            [(row, *place, weight) for place, weight in weights.items()],
        )

    def learn(self, now: float) -> None:
        """Computes the rates again, from the counts of all processes and a sample of the intervals that are still open."""
        reuse = self._reuse
        reuse.counts = self.counts()
        if reuse.counts.sum() > MEMORY / 2:
            self._db.execute("UPDATE intervals SET count = count / 2")
        reuse.learn([*self._open_intervals("objects", now), *self._open_intervals("ghosts", now)], now)
        self._news = 0

    def counts(self) -> Any:
        """The counts of `ReuseModel`."""
        counts = np.zeros((2, KINDS, OCTAVES))
        numbers = [counts.shape[0] - 1, KINDS - 1, OCTAVES - 1, MEMORY]
        for row, kind, octave, count in self._db.execute(
            "SELECT row, kind, octave, count FROM intervals WHERE typeof(row) = 'integer' AND typeof(kind) = 'integer'"
            " AND typeof(octave) = 'integer' AND row BETWEEN 0 AND ? AND kind BETWEEN 0 AND ? AND octave BETWEEN 0 AND ?"
            " AND count BETWEEN 0 AND ?",
            numbers,
        ):
            counts[row, kind, octave] = count
        return counts

    def _open_intervals(self, table: str, now: float) -> list[ReuseStats]:
        """The statistics of a table's rows, or of a sample: one for each kind and age, with the weight of all of them."""
        first, last = self._db.execute(f"SELECT MIN(number), MAX(number) FROM {table}").fetchone()
        if first is None:
            return []
        (rows,) = self._db.execute(
            "SELECT objects FROM totals" if table == "objects" else "SELECT COUNT(*) FROM ghosts"
        ).fetchone()
        rows = min(max(rows, 1), last - first + 1)
        wide = math.ceil((last - first + 1) / rows * SAMPLE / _RANGES)
        if rows <= SAMPLE or wide * _RANGES > last - first:
            starts, wide = [first], last - first + 1
        else:
            starts = random.Random(last).sample(range(first, last + 1, wide), _RANGES)
        cases = " ".join(f"WHEN {now!r} - used < {2**one} THEN {one}" for one in range(OCTAVES - 1))
        found = self._db.execute(
            f"WITH begun(at) AS (VALUES {', '.join(['(?)'] * len(starts))})"
            f" SELECT COUNT(*), MAX(1, MIN(uses, 9)) AS used_so, ABS(CAST(bucket AS INTEGER)) % {REQUEST_BUCKETS} AS class,"
            f" CASE {cases} ELSE {OCTAVES - 1} END AS octave, SUM(MAX(0.0, MIN(weight, 1.0)))"
            f" FROM begun CROSS JOIN {table} ON number >= at AND number < at + ? GROUP BY used_so, class, octave",
            (*starts, wide),
        ).fetchall()
        share = rows / max(1, sum(number for number, *_ in found)) if len(starts) > 1 else 1.0
        return [
            ReuseStats(1.0, now - (2 ** (octave - 1) if octave else 0), uses, RequestTraits(bucket, share * weight))
            for _, uses, bucket, octave, weight in found
        ]

    def _refresh(self, now: float) -> None:
        """Learns if there is enough news."""
        if self._news * _GROWTH > self._db.execute("SELECT objects FROM totals").fetchone()[0]:
            self.learn(now)
        states = self._db.execute("SELECT fingerprint FROM made WHERE states > 0")
        self._with_state = frozenset(fingerprint for (fingerprint,) in states)

    # ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def of(self, stats: ReuseStats, now: float) -> float:
        """The rank of an object that is used now."""
        if self._news == math.inf:
            self._refresh(now)
        return self._reuse.value(stats, now)

    def renew_leaves(self, keys: Sequence[bytes], now: float) -> None:
        """Computes the ranks again of those of these objects that nothing follows, in a transaction.

        Others have no place in the order. Their stored rank is that of their last use, or later.
        """
        if self._news == math.inf:
            self._refresh(now)
        rows = rows_of(self._db, f"number, rank, {_RANKED}", keys, "AND children = 0")
        ranks = [(new, number) for number, rank, *row in rows if (new := self._rank(row, now)) != rank]
        self._db.executemany("UPDATE objects SET rank = ? WHERE number = ?", ranks)

    def _renew(self, count: int, now: float) -> None:
        """Computes the ranks of those of the next rows again that nothing follows: others have no place in the order."""
        with self._unsynced():
            (hand,) = self._db.execute("SELECT hand FROM totals").fetchone()
            query = f"SELECT number, children, {_RANKED} FROM objects WHERE number"
            rows = self._db.execute(f"{query} > ? ORDER BY number LIMIT ?", (hand, count)).fetchall()
            if len(rows) < count:
                rows += self._db.execute(f"{query} <= ? ORDER BY number LIMIT ?", (hand, count - len(rows))).fetchall()
            ranks = [(self._rank(row, now), number) for number, children, *row in rows if not children]
            self._db.executemany("UPDATE objects SET rank = ? WHERE number = ?", ranks)
            if rows:
                self._db.execute("UPDATE totals SET hand = ?", (rows[-1][0],))

    def _rank(self, row: Sequence[Any], now: float) -> float:
        fingerprint, kind, seconds, allocated, *used = row
        stats = stats_of(used, seconds, allocated)
        if kind == KV and fingerprint in self._with_state and stats.last < now - WAIT:
            return -math.inf
        return self._reuse.value(stats, now)

    @contextmanager
    def _unsynced(self) -> Iterator[None]:
        """A transaction that a crash may undo."""
        self._db.execute("PRAGMA synchronous=NORMAL")
        try:
            with schema.change(self._db):
                yield
        finally:
            self._db.execute("PRAGMA synchronous=FULL")

    # ── victims ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def victims(
        self,
        spare: Collection[bytes],
        need: int,
        now: float,
        limits: OwnerLimits,
        coming: Collection[bytes] = (),
        most: int | None = None,
    ) -> list[bytes]:
        """See `Catalog.victims`. `coming`: the owners for whom `limits` counts something already."""
        self._refresh(now)
        self._renew(LEAST, now)
        self.hold(limits, coming)
        found = self._choose(spare, need, now, limits, most)
        if (more := PER_VICTIM * len(found) - LEAST) > 0:
            self._renew(more, now)
        return found

    def hold(self, limits: OwnerLimits, owners: Collection[bytes]) -> None:
        """Counts what is stored of `owners`, and of those who hold most. It stops at the first who is not above the quota."""
        if not limits.on:
            return
        for owner in owners:
            limits.hold(owner, sum(size for (size,) in self._db.execute("SELECT bytes FROM owned WHERE owner = ?", (owner,))))
        for owner, size in self._db.execute("SELECT owner, bytes FROM owned ORDER BY bytes DESC"):
            if owner not in owners:
                limits.hold(owner, size)
                if owner not in limits.over():
                    break

    def _choose(self, spare: Collection[bytes], need: int, now: float, limits: OwnerLimits, most: int | None) -> list[bytes]:
        taken = set(spare)
        everyone = _Queue(self._leaves(), taken)
        own: dict[bytes, _Queue] = {}
        left: dict[bytes, int] = {}  # children that stay, by parent
        freed: list[_Leaf] = []
        found: list[bytes] = []
        while need > 0 and (most is None or len(found) < most):
            for owner in limits.over():
                if owner not in own:
                    own[owner] = _Queue(self._leaves(owner), taken)
                    for leaf in freed:
                        if leaf.owner == owner:
                            own[owner].push(leaf)
            firsts = [first for owner in limits.over() if (first := own[owner].first()) is not None]
            lowest = min(firsts) if firsts else everyone.first()
            if lowest is None:
                break
            found.append(lowest.key)
            taken.add(lowest.key)
            need -= lowest.size
            limits.hold(lowest.owner, -lowest.size)
            parent = self._parent(lowest.parent, left, now)
            if parent is not None:
                freed.append(parent)
                for queue in (everyone, *([own[parent.owner]] if parent.owner in own else [])):
                    queue.push(parent)
        return found

    def _leaves(self, owner: bytes | None = None) -> Iterator[Sequence[Any]]:
        whose = "" if owner is None else " AND owner = ?"
        query = f"SELECT {_LEAF} FROM objects WHERE children = 0 AND pinned = 0{whose} ORDER BY rank, used, start DESC, key"
        return self._db.execute(query, () if owner is None else (owner,))

    def _parent(self, key: bytes, left: dict[bytes, int], now: float) -> _Leaf | None:
        """A child of this object goes. The object, with its rank of now, if it is a leaf now that may be evicted."""
        if key not in left:
            left[key] = sum(number for (number,) in self._db.execute("SELECT children FROM objects WHERE key = ?", (key,)))
        left[key] -= 1
        if left[key]:
            return None
        row = self._db.execute(f"SELECT {_LEAF}, {_RANKED} FROM objects WHERE key = ? AND pinned = 0", (key,)).fetchone()
        if row is None:
            return None
        return _Leaf._make(row[: len(_Leaf._fields)])._replace(rank=self._rank(row[len(_Leaf._fields) :], now))


def keys_of(keys: Sequence[bytes], place: str = "?") -> Iterator[tuple[Sequence[bytes], str]]:
    """Keys for one query each, and that many places for them in its text."""
    for first in range(0, len(keys), TOGETHER):
        some = keys[first : first + TOGETHER]
        yield some, ", ".join([place] * len(some))


def rows_of(database: sqlite3.Connection, columns: str, keys: Sequence[bytes], more: str = "") -> Iterator[Any]:
    """The columns of the objects with these keys."""
    for some, places in keys_of(keys, "(?)"):  # a third faster than `key IN (?, …)`
        query = f"WITH wanted(one) AS (VALUES {places}) SELECT {columns} FROM wanted CROSS JOIN objects ON key = one {more}"
        yield from database.execute(query, some).fetchall()


def stats_of(columns: Sequence[Any], seconds: float = 1.0, allocated: int = 1) -> ReuseStats:
    """The statistics in the columns `USED` of an object that saves `seconds` of prefill. Its values may be garbage."""
    last, uses, bucket, weight = columns
    return ReuseStats(max(seconds, 1e-9) / max(1, allocated), last, uses, _traits(bucket, weight))


@lru_cache(1024)
def _traits(bucket: Any, weight: Any) -> RequestTraits:
    """One object for most objects of a request. Their values may be garbage."""
    return RequestTraits(int(bucket) % REQUEST_BUCKETS, min(max(weight, 0.0), 1.0))
