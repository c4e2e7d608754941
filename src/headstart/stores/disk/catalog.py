"""Catalogue: which objects there are, how much they occupy and how they are used, in SQLite.

The objects are the truth; this can be rebuilt from them. Every process has a catalogue of its own on the same file.
"""

from __future__ import annotations

import heapq
import math
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from headstart.core.quota import NoQuota, owner_of
from headstart.core.reuse import KINDS, MEMORY, OCTAVES, POLICIES, Reuse, Usage
from headstart.stores.base import Kind
from headstart.stores.disk.format import Label

VERSION = 2
GHOSTS = 1 << 15
"""Objects whose uses are remembered after they have gone."""
NOTES = 1 << 15
"""Notes that are kept: the latest."""
WAIT = 3600.0
"""Seconds for which rows may wait for a checkpoint behind them, where they are useless without."""
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
    pinned INTEGER NOT NULL DEFAULT 0,
    uses INTEGER NOT NULL DEFAULT 1,
    reply INTEGER NOT NULL DEFAULT -1,         -- tokens of the reply to the latest request, -1 if unknown
    kind TEXT NOT NULL DEFAULT 'rows'          -- or 'state'
);
CREATE INDEX IF NOT EXISTS by_parent ON objects (parent);
CREATE INDEX IF NOT EXISTS by_fingerprint ON objects (fingerprint, number);
CREATE TABLE IF NOT EXISTS ghosts (            -- objects that have gone, the latest
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    key BLOB NOT NULL UNIQUE,
    used REAL NOT NULL,
    heat REAL NOT NULL,
    uses INTEGER NOT NULL,
    reply INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS notes (             -- what is to be known again beside a block, and is gone with it
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    fingerprint BLOB NOT NULL,
    key BLOB NOT NULL,
    block BLOB NOT NULL,
    value BLOB NOT NULL,
    UNIQUE (fingerprint, key)
);
CREATE INDEX IF NOT EXISTS by_block ON notes (block);
CREATE TABLE IF NOT EXISTS learned (           -- core/reuse: one row of float64
    one INTEGER PRIMARY KEY CHECK (one = 1),
    counts BLOB NOT NULL
);
"""


_Item = tuple[float, float, int, bytes]
"""Rank, last use, the deeper first; the key."""


@dataclass(frozen=True, slots=True)
class Row:
    """An object as the catalogue knows it; `allocated` in bytes, times in seconds since 1970."""

    number: int
    label: Label
    allocated: int
    created: float
    used: float
    pinned: bool
    uses: int


@dataclass(frozen=True, slots=True)
class Note:
    """Something small that is to be known again, under `key`, for as long as the block `block` is there."""

    key: bytes
    block: bytes
    value: bytes


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
        self._db = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
        try:
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise sqlite3.NotSupportedError(f"the catalogue is of version {version}; this headstart reads {VERSION}")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            if version < VERSION:
                self._migrate()
        except BaseException:
            self._db.close()
            raise

    def _migrate(self) -> None:
        with self._change():
            columns = {column for _, column, *_ in self._db.execute("PRAGMA table_info(objects)")}
            if "kind" not in columns:  # it is of version 1, and no other process was faster
                self._db.execute("ALTER TABLE objects ADD COLUMN kind TEXT NOT NULL DEFAULT 'rows'")
            self._db.execute(f"PRAGMA user_version={VERSION}")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A transaction that nobody else's comes between."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield

    def add(self, objects: Iterable[tuple[Label, int]], now: float | None = None) -> None:
        """Records objects with their allocated bytes, in one transaction; a canonical one takes a derived one's place."""
        now = time.time() if now is None else now
        with self._change(), self._learning() as reuse:
            values = []
            for label, allocated in objects:
                usage = self._risen(label.key, now, reuse)
                values.append(
                    (
                        *(label.key, label.parent, label.fingerprint, label.start, _packed(label.tokens)),
                        *(int(label.canonical), label.seconds, allocated, now, usage.last, usage.heat, usage.uses, label.kind),
                    )
                )
            self._db.executemany(
                "INSERT INTO objects (key, parent, fingerprint, start, tokens, canonical, seconds, allocated, created, used,"
                " heat, uses, kind) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (key) DO UPDATE SET canonical = excluded.canonical, allocated = excluded.allocated",
                values,
            )

    def remove(self, keys: Collection[bytes]) -> None:
        """Forgets objects, but not how they were used, should they come again."""
        with self._change(), self._learning() as reuse:
            found = [(key, usage) for key in keys if (usage := self._usage("objects", key)) is not None]
            for _, usage in found:
                reuse.left(usage)
            self._db.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key, _ in found])
            self._db.executemany("DELETE FROM notes WHERE block = ?", [(key,) for key, _ in found])
            self._db.executemany(
                "INSERT OR REPLACE INTO ghosts (key, used, heat, uses, reply) VALUES (?, ?, ?, ?, ?)",
                [(key, usage.last, usage.heat, usage.uses, usage.reply) for key, usage in found],
            )
            self._db.execute("DELETE FROM ghosts WHERE number <= (SELECT MAX(number) FROM ghosts) - ?", (GHOSTS,))

    def use(self, uses: Collection[tuple[bytes, float]]) -> None:
        """Counts uses: keys with their times."""
        with self._change(), self._learning() as reuse:
            for key, now in uses:
                usage = self._usage("objects", key)
                if usage is not None:
                    reuse.returned(usage, now)
                    usage.use(now, self._half_life)
                    self._db.execute(
                        "UPDATE objects SET heat = ?, used = ?, uses = ?, reply = ? WHERE key = ?",
                        (usage.heat, now, usage.uses, usage.reply, key),
                    )

    def replied(self, replies: Collection[tuple[bytes, int]]) -> None:
        """Tells how many tokens the reply had to the request that has used an object last: keys with those."""
        with self._change():
            self._db.executemany("UPDATE objects SET reply = ? WHERE key = ?", [(tokens, key) for key, tokens in replies])

    def note(self, fingerprint: bytes, notes: Collection[Note]) -> None:
        """Keeps notes, in place of those under the same keys."""
        with self._change():
            self._db.executemany(
                "INSERT OR REPLACE INTO notes (fingerprint, key, block, value) VALUES (?, ?, ?, ?)",
                [(fingerprint, note.key, note.block, note.value) for note in notes],
            )
            self._db.execute("DELETE FROM notes WHERE number <= (SELECT MAX(number) FROM notes) - ?", (NOTES,))

    def notes(self, fingerprint: bytes, after: int = 0) -> Iterator[tuple[int, Note]]:
        """Notes of a fingerprint with their numbers, in the order of their coming, behind number `after`."""
        query = "SELECT number, key, block, value FROM notes WHERE fingerprint = ? AND number > ? ORDER BY number"
        for number, *note in self._db.execute(query, (fingerprint, after)):
            if not all(isinstance(one, bytes) for one in note):
                raise sqlite3.DatabaseError("a note that nobody here has written")
            yield number, Note(*note)

    def _usage(self, table: str, key: bytes) -> Usage | None:
        """How an object was, or a ghost had been, used. What it saves is left out."""
        found = self._db.execute(f"SELECT used, uses, heat, reply FROM {table} WHERE key = ?", (key,)).fetchone()
        return None if found is None else Usage(1.0, *found)

    def _risen(self, key: bytes, now: float, reuse: Reuse) -> Usage:
        """The usage of an object that comes now; its ghost, if it has one, is gone then."""
        usage = self._usage("ghosts", key)
        if usage is None:
            return Usage(1.0, now, 1, now / self._half_life)
        self._db.execute("DELETE FROM ghosts WHERE key = ?", (key,))
        reuse.returned(usage, now, gone=True)
        usage.use(now, self._half_life)
        return usage

    def _learned(self) -> Reuse:
        found = self._db.execute("SELECT counts FROM learned").fetchone()
        if found is None or len(found[0]) != 8 * KINDS * (OCTAVES + 1):
            return Reuse()
        counts = np.frombuffer(found[0], np.float64).reshape(KINDS, OCTAVES + 1).copy()
        return Reuse(counts if (np.abs(counts) <= MEMORY).all() else None)

    @contextmanager
    def _learning(self) -> Iterator[Reuse]:
        """What was learned; what is learned within is kept."""
        reuse = self._learned()
        before = reuse.counts.tobytes()
        yield reuse
        data = reuse.counts.tobytes()
        if data != before:
            self._db.execute("INSERT OR REPLACE INTO learned (one, counts) VALUES (1, ?)", (data,))

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
        """Keys of the first blocks of all other fingerprints' chains, by fingerprint."""
        found: dict[bytes, set[bytes]] = {}
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
            key, seen = label.parent, set[bytes]()
            while key not in found and key not in seen and (above := self._above(key)) is not None:
                seen.add(key)
                key = above[0]
            found[label.key] = found.get(key) or owner_of(key)
        return found

    def _above(self, key: bytes) -> tuple[bytes, int] | None:
        """What an object hangs on, and the bytes that it occupies itself."""
        found: tuple[bytes, int] | None = self._db.execute(
            "SELECT parent, allocated FROM objects WHERE key = ?", (key,)
        ).fetchone()
        return found

    def victims(
        self, spare: Collection[bytes], need: int, now: float | None = None, shares: NoQuota | None = None
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
        order: dict[bytes, tuple[float, float, int]] = {}
        children: dict[bytes, int] = {}
        with_state = {one for (one,) in self._db.execute("SELECT DISTINCT fingerprint FROM objects WHERE kind = 'state'")}
        for key, parent, fingerprint, kind, start, seconds, allocated, pinned, *used in self._db.execute(
            "SELECT key, parent, fingerprint, kind, start, seconds, allocated, pinned, used, uses, heat, reply FROM objects"
        ):
            known[key] = (parent, allocated, pinned)
            usage = Usage(max(seconds, 1e-9) / max(1, allocated), *used)
            useless = kind == "rows" and fingerprint in with_state and usage.last < now - WAIT  # once nothing hangs on it
            order[key] = (-math.inf if useless else self._policy(usage, reuse, now), usage.last, -start)
            children[parent] = children.get(parent, 0) + 1
        shares = NoQuota() if shares is None else shares
        owner = _owners({key: parent for key, (parent, *_) in known.items()}) if shares.on else {}
        for key, who in owner.items():
            shares.hold(who, known[key][1])
        first, rest = list[_Item](), list[_Item]()
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

    def kept(self, spare: Collection[bytes], shares: NoQuota | None = None) -> int:
        """Bytes that `victims` never brings: of what is pinned or in `spare`, and of all that it hangs on.

        `shares` is told whose they are.
        """
        owner: dict[bytes, bytes] = {}
        total = 0
        for key in [*spare, *(key for (key,) in self._db.execute("SELECT key FROM objects WHERE pinned"))]:
            path, size = list[bytes](), 0
            while key not in owner and (above := self._above(key)) is not None:
                owner[key] = b""
                path.append(key)
                key, size = above[0], size + above[1]
            who = owner.get(key) or owner_of(key)
            owner.update(dict.fromkeys(path, who))
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
            "SELECT number, key, parent, fingerprint, start, tokens, canonical, seconds, kind, allocated, created, used,"
            f" pinned, uses FROM objects {where}"
        )
        for number, key, parent, fingerprint, start, tokens, canonical, seconds, kind, *rest in self._db.execute(query, values):
            ids = all(isinstance(one, bytes) and len(one) == 32 for one in (key, parent, fingerprint))
            if not (ids and isinstance(start, int) and kind in get_args(Kind)):
                raise sqlite3.DatabaseError("a row that nobody here has written")
            label = Label(key, parent, fingerprint, start, _unpacked(tokens), bool(canonical), seconds, kind)
            allocated, created, used, pinned, uses = rest
            yield Row(number, label, allocated, created, used, bool(pinned), uses)


def _owners(parents: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The owner of each object, of which this says what it hangs on."""
    owner: dict[bytes, bytes] = {}
    for key in parents:
        path = list[bytes]()
        while key in parents and key not in owner:
            owner[key] = b""  # a damaged catalogue may lead in circles
            path.append(key)
            key = parents[key]
        owner.update(dict.fromkeys(path, owner.get(key) or owner_of(key)))
    return owner


def _packed(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def _unpacked(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, "<i4").tolist())


def damages(error: Exception) -> bool:
    """Whether an error of the catalogue says that it holds garbage, rather than that it cannot be used just now."""
    if isinstance(error, sqlite3.OperationalError):
        # Tables other than ours; or, without a code, values of a type that ours do not have.
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF == sqlite3.SQLITE_ERROR
    return isinstance(error, sqlite3.DatabaseError | ValueError | TypeError) and not isinstance(
        error, sqlite3.NotSupportedError
    )
