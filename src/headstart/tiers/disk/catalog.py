"""Catalogue: which objects there are, how much they occupy and how they are used, in SQLite.

The objects are the truth; this can be rebuilt from them. Every process has a catalogue of its own on the same file.
"""

from __future__ import annotations

import heapq
import math
import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import numpy as np

from headstart.interfaces.tier import EntryKind
from headstart.prefix_cache.quota import NoQuota, OwnerLimits, owner_of
from headstart.prefix_cache.reuse_model import (
    KINDS,
    MEMORY,
    OCTAVES,
    POLICIES,
    REQUEST_BUCKETS,
    RequestTraits,
    ReuseModel,
    ReuseStats,
)
from headstart.tiers.disk import schema
from headstart.tiers.disk.ages import Ages
from headstart.tiers.disk.format import Label

GHOSTS = 1 << 15
"""Objects whose uses are remembered after they have gone."""
NOTES = 1 << 15
"""Notes that are kept: the latest."""
WAIT = 3600.0
"""Seconds for which rows may wait for a checkpoint behind them, where they are useless without."""

_USED = "used, uses, heat, sort, weight"
_DERIVED = "FROM objects WHERE key = ? AND NOT canonical"

_RankedKey = tuple[float, float, int, bytes]
"""Rank, last use, the deeper first; the key."""


@dataclass(frozen=True, slots=True)
class Row:
    """An object as the catalogue knows it; `allocated` in bytes, times in seconds since 1970."""

    number: int
    label: Label
    allocated: int
    used: float
    pinned: bool
    uses: int


@dataclass(frozen=True, slots=True)
class Note:
    """Something small that is to be known again, under `key`, for as long as the block `block` is there."""

    key: bytes
    block: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class StoredModel:
    """What objects of a fingerprint belong to, as people call it. Decides nothing.

    Attributes:
        file: path of the weights.
        mark: what changes with that file; "" if it is not there.
    """

    name: str
    file: str
    mark: str

    @classmethod
    def of(cls, name: str, file: str) -> StoredModel:
        """The model as it is now."""
        try:
            found = os.stat(file)
        except (OSError, ValueError):
            return cls(name, file, "")
        return cls(name, file, f"{found.st_size} {found.st_mtime_ns}")

    @property
    def at_hand(self) -> bool:
        """Whether its file is still the one that it was."""
        return bool(self.mark) and self.of(self.name, self.file) == self


class Catalog:
    """A connection to the catalogue. For one thread at a time.

    Args:
        half_life: seconds in which a use halves in weight, for policies that count uses.
        policy: a row of `POLICIES`.

    Raises:
        sqlite3.Error: it cannot be opened, is damaged, or of a later version.
    """

    def __init__(self, path: Path, half_life: float, policy: str = "value") -> None:
        self._half_life = half_life
        self._policy = POLICIES[policy]
        self._db = schema.connect(path)
        self.ages = Ages(self._db)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A transaction that nobody else's comes between."""
        with schema.change(self._db):
            yield

    def add(self, objects: Iterable[tuple[Label, int]], now: float | None = None) -> None:
        """Records objects with their allocated bytes, in one transaction; a canonical one takes a derived one's place."""
        now = time.time() if now is None else now
        with self._change():
            values, better = [], []
            for label, allocated in objects:
                if label.canonical and self._db.execute(f"SELECT 1 {_DERIVED}", (label.key,)).fetchone():
                    better.append(label.key)
                stats = self._revived(label.key, now)
                values.append(
                    (
                        *(label.key, label.parent, label.fingerprint, label.start, _packed(label.tokens)),
                        *(int(label.canonical), label.seconds, allocated, now, stats.last, stats.heat, stats.uses, label.kind),
                        *(stats.request_traits.bucket, stats.request_traits.weight, label.written or now, label.owner),
                    )
                )
            self._db.executemany(
                "INSERT INTO objects (key, parent, fingerprint, start, tokens, canonical, seconds, allocated, created, used,"
                " heat, uses, kind, sort, weight, written, owner)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (key) DO UPDATE SET canonical = excluded.canonical, allocated = excluded.allocated",
                values,
            )
            for key in better:  # to other processes they are new
                self._db.execute("UPDATE sqlite_sequence SET seq = seq + 1 WHERE name = 'objects'")
                query = "UPDATE objects SET number = (SELECT seq FROM sqlite_sequence WHERE name = 'objects') WHERE key = ?"
                self._db.execute(query, (key,))

    def remove(self, keys: Collection[bytes], now: float | None = None) -> None:
        """Forgets objects, but not how they were used, should they come again."""
        now = time.time() if now is None else now
        with self._change():
            self._db.executemany(
                f"INSERT OR REPLACE INTO gone (key, {_USED}, written, owner)"
                f" SELECT key, {_USED}, written, owner FROM objects WHERE key = ?",
                [(key,) for key in keys],
            )
            self._db.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in keys])
            self._db.executemany("DELETE FROM notes WHERE block = ?", [(key,) for key in keys])
            oldest = "FROM gone WHERE number <= (SELECT MAX(number) FROM gone) - ?"
            for used in self._db.execute(f"SELECT {_USED} {oldest}", (GHOSTS,)).fetchall():
                self._count(1, _stats(used), now)
            self._db.execute(f"DELETE {oldest}", (GHOSTS,))
            self._db.execute("UPDATE spells SET count = count / 2 WHERE (SELECT SUM(count) FROM spells) > ?", (MEMORY / 2,))

    def ghosts(self, keys: Collection[bytes]) -> set[bytes]:
        """Which of these are remembered as having made room, rather than having been erased."""
        return {key for key in keys if self._stats("gone", key) is not None}

    def use(self, uses: Collection[tuple[bytes, float]]) -> None:
        """Counts uses: keys with their times."""
        with self._change():
            for key, now in uses:
                stats = self._stats("objects", key)
                if stats is not None:
                    self._count(0, stats, now)
                    stats.use(now, self._half_life)
                    self._db.execute(
                        "UPDATE objects SET heat = ?, used = ?, uses = ? WHERE key = ?", (stats.heat, now, stats.uses, key)
                    )

    def replied(self, replies: Collection[tuple[bytes, RequestTraits]]) -> None:
        """Tells of the requests that have used objects last: keys with those."""
        values = [(request_traits.bucket, request_traits.weight, key) for key, request_traits in replies]
        with self._change():
            self._db.executemany("UPDATE objects SET sort = ?, weight = ? WHERE key = ?", values)

    def note(self, fingerprint: bytes, notes: Collection[Note], now: float | None = None, since: float | None = None) -> None:
        """Keeps notes, in place of those under the same keys. `since`: only if it is still `Ages.wiped` up to when."""
        now = time.time() if now is None else now
        with self._change():
            if since is not None and self.ages.wiped()[0] != since:
                return
            self._db.executemany(
                "INSERT OR REPLACE INTO notes (fingerprint, key, block, value, written) VALUES (?, ?, ?, ?, ?)",
                [(fingerprint, note.key, note.block, note.value, now) for note in notes],
            )
            self._db.execute("DELETE FROM notes WHERE number <= (SELECT MAX(number) FROM notes) - ?", (NOTES,))

    def notes(self, fingerprint: bytes, after: int = 0) -> Iterator[tuple[int, Note]]:
        """Notes of a fingerprint with their numbers, in the order of their coming, behind number `after`."""
        query = "SELECT number, key, block, value FROM notes WHERE fingerprint = ? AND number > ? ORDER BY number"
        for number, *note in self._db.execute(query, (fingerprint, after)):
            if not all(isinstance(one, bytes) for one in note):
                raise sqlite3.DatabaseError("a note that nobody here has written")
            yield number, Note(*note)

    def learn(self, fingerprint: bytes, model: StoredModel) -> None:
        """Remembers what a fingerprint is of."""
        if self.models().get(fingerprint) != model:
            with self._change():
                values = fingerprint, model.name, model.file, model.mark
                self._db.execute("INSERT OR REPLACE INTO models (fingerprint, name, file, mark) VALUES (?, ?, ?, ?)", values)

    def models(self) -> dict[bytes, StoredModel]:
        """What is known of fingerprints."""
        found = self._db.execute("SELECT fingerprint, name, file, mark FROM models").fetchall()
        return {bytes(fingerprint): StoredModel(*map(str, said)) for fingerprint, *said in found}

    def _stats(self, table: str, key: bytes) -> ReuseStats | None:
        """How an object was, or a ghost had been, used. What it saves is left out."""
        found = self._db.execute(f"SELECT {_USED} FROM {table} WHERE key = ?", (key,)).fetchone()
        return None if found is None else _stats(found)

    def _revived(self, key: bytes, now: float) -> ReuseStats:
        """The usage of an object that comes now; its ghost, if it has one, is gone then."""
        stats = self._stats("gone", key)
        if stats is None:
            return ReuseStats(1.0, now, 1, now / self._half_life)
        self._db.execute("DELETE FROM gone WHERE key = ?", (key,))
        self._count(0, stats, now)
        stats.use(now, self._half_life)
        return stats

    def _count(self, row: int, stats: ReuseStats, now: float) -> None:
        """Counts a spell: 0, it has ended; 1, nobody follows it any more."""
        self._db.execute(
            "INSERT INTO spells (row, kind, octave, count) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (row, kind, octave) DO UPDATE SET count = count + excluded.count",
            (row, stats.kind, stats.age(now), stats.request_traits.weight),
        )

    def _learned(self) -> ReuseModel:
        reuse = ReuseModel()
        numbers = [reuse.counts.shape[0] - 1, KINDS - 1, OCTAVES - 1, MEMORY]
        for row, kind, octave, count in self._db.execute(
            "SELECT row, kind, octave, count FROM spells WHERE typeof(row) = 'integer' AND typeof(kind) = 'integer'"
            " AND typeof(octave) = 'integer' AND row BETWEEN 0 AND ? AND kind BETWEEN 0 AND ? AND octave BETWEEN 0 AND ?"
            " AND count BETWEEN 0 AND ?",
            numbers,
        ):
            reuse.counts[row, kind, octave] = count
        return reuse

    def pin(self, keys: Collection[bytes], pinned: bool) -> int:
        """Pins or unpins; says how many objects that were."""
        with self._change():
            return sum(
                self._db.execute("UPDATE objects SET pinned = ? WHERE key = ?", (int(pinned), key)).rowcount for key in keys
            )

    def children(self, key: bytes) -> set[bytes]:
        """Keys of the objects that hang on this one."""
        return {child for (child,) in self._db.execute("SELECT key FROM objects WHERE parent = ?", (key,))}

    def get(self, key: bytes) -> Row | None:
        return next(self._rows("WHERE key = ?", key), None)

    def rows(self, fingerprint: bytes | None = None, after: int = 0) -> Iterator[Row]:
        """Objects of a fingerprint (or all), in the order of their coming, behind number `after`."""
        if fingerprint is None:
            return self._rows("WHERE number > ? ORDER BY number", after)
        return self._rows("WHERE fingerprint = ? AND number > ? ORDER BY number", fingerprint, after)

    def foreign(self, fingerprint: bytes) -> dict[bytes, set[bytes]]:
        """Keys of the first blocks of all other fingerprints' chains, by fingerprint; also where no first block is left."""
        others = self._db.execute("SELECT DISTINCT fingerprint FROM objects WHERE fingerprint != ?", (fingerprint,))
        found = {other: set[bytes]() for (other,) in others.fetchall()}
        query = "SELECT fingerprint, key FROM objects WHERE start = 0 AND kind = 'rows' AND fingerprint != ?"
        for other, key in self._db.execute(query, (fingerprint,)):
            found.setdefault(other, set()).add(key)
        return found

    def keys(self) -> set[bytes]:
        return {key for (key,) in self._db.execute("SELECT key FROM objects")}

    def owners(self, labels: Iterable[Label]) -> dict[bytes, bytes]:
        """The owners of objects, by key, each behind what it hangs on."""
        found: dict[bytes, bytes] = {}
        for label in labels:
            owner = label.owner or found.get(label.parent, b"")
            if not owner and (above := self._above(label.parent)) is not None:
                owner = above[2]
            elif not owner and label.start == 0 and label.kind == "rows":
                owner = owner_of(label.parent)  # a root, which says so
            found[label.key] = owner
        return found

    def _above(self, key: bytes) -> tuple[bytes, int, bytes] | None:
        """What an object hangs on, the bytes that it occupies itself, and whose it is."""
        found: tuple[bytes, int, bytes] | None = self._db.execute(
            "SELECT parent, allocated, owner FROM objects WHERE key = ?", (key,)
        ).fetchone()
        return found

    def victims(
        self, spare: Collection[bytes], need: int, now: float | None = None, shares: OwnerLimits | None = None
    ) -> list[Row]:
        """What to evict so that `need` bytes come free: the lowest ranks first, and nothing before what hangs on it.

        Of models that have checkpoints, rows without any at their end or behind go first of all, once they have waited long.
        Neither pinned objects nor those in `spare` are among them, so it may be less than `need`.

        `shares`: what those will hold beside for whom room is made; it is told of all that is here. What is theirs who are
        beyond their quota goes first.
        """
        now = time.time() if now is None else now
        reuse = self._learned()
        known: dict[bytes, tuple[bytes, int, int]] = {}
        used: dict[bytes, tuple[ReuseStats, bool, int]] = {}
        children: dict[bytes, int] = {}
        owner: dict[bytes, bytes] = {}
        with_state = {one for (one,) in self._db.execute("SELECT DISTINCT fingerprint FROM objects WHERE kind = 'state'")}
        for key, parent, fingerprint, kind, start, seconds, allocated, pinned, whose, *how in self._db.execute(
            f"SELECT key, parent, fingerprint, kind, start, seconds, allocated, pinned, owner, {_USED} FROM objects"
        ):
            owner[key] = whose
            known[key] = (parent, allocated, pinned)
            stats = _stats(how, max(seconds, 1e-9) / max(1, allocated))
            useless = kind == "rows" and fingerprint in with_state and stats.last < now - WAIT  # once nothing hangs on it
            used[key] = stats, useless, start
            children[parent] = children.get(parent, 0) + 1
        gone = map(_stats, self._db.execute(f"SELECT {_USED} FROM gone"))
        reuse.learn(chain((stats for stats, *_ in used.values()), gone), now)
        order = {
            key: (-math.inf if useless else self._policy(stats, reuse, now), stats.last, -start)
            for key, (stats, useless, start) in used.items()
        }
        shares = NoQuota() if shares is None else shares
        owner = owner if shares.on else {}
        for key, who in owner.items():
            shares.hold(who, known[key][1])
        first, rest = list[_RankedKey](), list[_RankedKey]()
        for key in known.keys() - children.keys():
            (first if owner.get(key) in shares.over() else rest).append((*order[key], key))
        found: list[bytes] = []
        for leaves in (first, rest):
            heapq.heapify(leaves)
            while need > 0 and leaves:
                item = heapq.heappop(leaves)
                key = item[-1]
                if leaves is first and owner[key] not in shares.over():
                    rest.append(item)  # its owner has given enough
                    continue
                parent, allocated, pinned = known[key]
                if pinned or key in spare:
                    continue
                found.append(key)
                need -= allocated
                shares.hold(owner.get(key, b""), -allocated)
                children[parent] -= 1
                if parent in known and not children[parent]:
                    heapq.heappush(leaves, (*order[parent], parent))
        return [row for key in found if (row := self.get(key)) is not None]

    def kept(self, spare: Collection[bytes], shares: OwnerLimits | None = None) -> int:
        """Bytes that `victims` never brings: of what is pinned or in `spare`, and of all that it hangs on.

        `shares` is told whose they are.
        """
        seen: set[bytes] = set()
        total = 0
        for key in [*spare, *(key for (key,) in self._db.execute("SELECT key FROM objects WHERE pinned"))]:
            while key not in seen and (above := self._above(key)) is not None:
                seen.add(key)
                key, size, who = above
                total += size
                if shares is not None:
                    shares.hold(who, size)
        return total

    def version(self) -> tuple[int, int]:
        """Numbers of which the first changes with what other connections write, the second with what this one does."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0]), self._db.total_changes

    def used(self) -> int:
        """Bytes that all objects occupy."""
        return int(self._db.execute("SELECT COALESCE(SUM(allocated), 0) FROM objects").fetchone()[0])

    def __len__(self) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM objects").fetchone()[0])

    def _rows(self, where: str, *values: object) -> Iterator[Row]:
        query = (
            "SELECT number, key, parent, fingerprint, start, tokens, canonical, seconds, kind, written, owner, allocated,"
            f" used, pinned, uses FROM objects {where}"
        )
        for (
            number,
            key,
            parent,
            fingerprint,
            start,
            tokens,
            canonical,
            seconds,
            kind,
            written,
            owner,
            *rest,
        ) in self._db.execute(query, values):
            ids = all(isinstance(one, bytes) and len(one) == 32 for one in (key, parent, fingerprint))
            if not (ids and isinstance(start, int) and kind in get_args(EntryKind) and isinstance(owner, bytes)):
                raise sqlite3.DatabaseError("a row that nobody here has written")
            label = Label(
                *(key, parent, fingerprint, start, _unpacked(tokens), bool(canonical)), seconds, kind, float(written), owner
            )
            allocated, used, pinned, uses = rest
            yield Row(number, label, allocated, used, bool(pinned), uses)


def _stats(columns: Sequence[Any], saved_per_byte: float = 1.0) -> ReuseStats:
    """What the columns `_USED` say."""
    last, uses, heat, bucket, weight = columns
    return ReuseStats(
        saved_per_byte, last, uses, heat, RequestTraits(int(bucket) % REQUEST_BUCKETS, min(max(weight, 0.0), 1.0))
    )


def _packed(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def _unpacked(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, "<i4").tolist())
