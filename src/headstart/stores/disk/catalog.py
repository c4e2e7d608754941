"""Catalogue: which objects there are, how much they occupy and how they are used, in SQLite.

The objects are the truth; this can be rebuilt from them. Every process has a catalogue of its own on the same file.
"""

from __future__ import annotations

import heapq
import math
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headstart.stores.disk.format import Label

VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- grows: what others have added is behind the last one seen
    key BLOB NOT NULL UNIQUE,
    parent BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    start INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    canonical INTEGER NOT NULL,
    seconds REAL NOT NULL,
    allocated INTEGER NOT NULL,                -- bytes on disk
    created REAL NOT NULL,
    used REAL NOT NULL,                        -- last time
    heat REAL NOT NULL,                        -- log2 of the decayed sum of uses, at time 0
    pinned INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS by_parent ON objects (parent);
CREATE INDEX IF NOT EXISTS by_fingerprint ON objects (fingerprint, number);
"""


@dataclass(frozen=True, slots=True)
class Row:
    """An object as the catalogue knows it; `allocated` in bytes, times in seconds since 1970."""

    number: int
    label: Label
    allocated: int
    created: float
    used: float
    heat: float
    pinned: bool

    @property
    def rank(self) -> float:
        """Seconds saved per byte × chance of reuse, as a logarithm: the lowest goes first."""
        return self.heat + math.log2(max(self.label.seconds, 1e-9) / max(1, self.allocated))


class Catalog:
    """A connection to the catalogue. For one thread at a time.

    Args:
        half_life: seconds in which a use halves in weight.

    Raises:
        sqlite3.Error: it cannot be opened, is damaged, or of a later version.
    """

    def __init__(self, path: Path, half_life: float) -> None:
        self._half_life = half_life
        self._db = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
        try:
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise sqlite3.NotSupportedError(f"the catalogue is of version {version}; this headstart reads {VERSION}")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={VERSION}")
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def add(self, objects: Iterable[tuple[Label, int]], now: float | None = None) -> None:
        """Records objects with their allocated bytes, in one transaction; a canonical one takes a derived one's place."""
        now = time.time() if now is None else now
        heat = now / self._half_life
        values = [
            (
                *(label.key, label.parent, label.fingerprint, label.start, _packed(label.tokens)),
                *(int(label.canonical), label.seconds, allocated, now, now, heat),
            )
            for label, allocated in objects
        ]
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(
                "INSERT INTO objects (key, parent, fingerprint, start, tokens, canonical, seconds, allocated, created, used,"
                " heat)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (key) DO UPDATE SET canonical = excluded.canonical, allocated = excluded.allocated",
                values,
            )

    def remove(self, keys: Collection[bytes]) -> None:
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in keys])

    def use(self, uses: Collection[tuple[bytes, float]]) -> None:
        """Counts uses: keys with their times."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for key, now in uses:
                found = self._db.execute("SELECT heat FROM objects WHERE key = ?", (key,)).fetchone()
                if found is not None:
                    beat = now / self._half_life
                    high, low = max(found[0], beat), min(found[0], beat)
                    heat = high + math.log2(1.0 + 2.0 ** (low - high))
                    self._db.execute("UPDATE objects SET heat = ?, used = ? WHERE key = ?", (heat, now, key))

    def pin(self, keys: Collection[bytes], pinned: bool) -> int:
        """Pins or unpins; says how many objects that were."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            return sum(
                self._db.execute("UPDATE objects SET pinned = ? WHERE key = ?", (int(pinned), key)).rowcount for key in keys
            )

    def get(self, key: bytes) -> Row | None:
        return next(self._rows("WHERE key = ?", key), None)

    def rows(self, fingerprint: bytes | None = None, after: int = 0) -> Iterator[Row]:
        """Objects of a fingerprint (or all), in the order of their coming, behind number `after`."""
        if fingerprint is None:
            return self._rows("WHERE number > ? ORDER BY number", after)
        return self._rows("WHERE fingerprint = ? AND number > ? ORDER BY number", fingerprint, after)

    def keys(self) -> set[bytes]:
        return {key for (key,) in self._db.execute("SELECT key FROM objects")}

    def victims(self, spare: Collection[bytes], need: int) -> list[Row]:
        """What to evict so that `need` bytes come free: the lowest ranks first, and nothing before what hangs on it.

        Neither pinned objects nor those in `spare` are among them, so it may be less than `need`.
        """
        rows = {row.label.key: row for row in self._rows("")}
        children: dict[bytes, int] = {}
        for row in rows.values():
            children[row.label.parent] = children.get(row.label.parent, 0) + 1
        leaves = [(*_order(row), row.label.key) for row in rows.values() if row.label.key not in children]
        heapq.heapify(leaves)
        found: list[Row] = []
        while need > 0 and leaves:
            row = rows[heapq.heappop(leaves)[-1]]
            if row.pinned or row.label.key in spare:
                continue
            found.append(row)
            need -= row.allocated
            children[row.label.parent] -= 1
            parent = rows.get(row.label.parent)
            if parent is not None and not children[row.label.parent]:
                heapq.heappush(leaves, (*_order(parent), parent.label.key))
        return found

    def used(self) -> int:
        """Bytes that all objects occupy."""
        return int(self._db.execute("SELECT COALESCE(SUM(allocated), 0) FROM objects").fetchone()[0])

    def __len__(self) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM objects").fetchone()[0])

    def _rows(self, where: str, *values: object) -> Iterator[Row]:
        query = (
            "SELECT number, key, parent, fingerprint, start, tokens, canonical, seconds, allocated, created, used, heat, pinned"
            f" FROM objects {where}"
        )
        for number, key, parent, fingerprint, start, tokens, canonical, seconds, *rest in self._db.execute(query, values):
            label = Label(key, parent, fingerprint, start, _unpacked(tokens), bool(canonical), seconds)
            allocated, created, used, heat, pinned = rest
            yield Row(number, label, allocated, created, used, heat, bool(pinned))


def _order(row: Row) -> tuple[float, int]:
    return row.rank, -row.label.start


def _packed(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def _unpacked(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, "<i4").tolist())
