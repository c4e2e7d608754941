"""Catalogue: a SQLite file that lists the objects, their sizes and their uses.

The catalogue can be rebuilt from the objects. Every process has its own connection to the file.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from headstart.interfaces.tier import KV, STATE, EntryKind
from headstart.prefix_cache.quota import NoQuota, OwnerLimits, owner_of
from headstart.prefix_cache.reuse_model import RequestTraits, ReuseStats
from headstart.tiers.disk import schema
from headstart.tiers.disk.ages import Ages
from headstart.tiers.disk.format import Label
from headstart.tiers.disk.ranks import USED, Ranks, keys_of, rows_of, stats_of

log = logging.getLogger("headstart.disk")

GHOSTS = 1 << 15
"""Most ghosts that are kept: the latest."""
NOTES = 1 << 15
"""Most notes that are kept: the latest."""
FIRST = 4096
"""Most first blocks of another fingerprint that are looked for."""


@dataclass(frozen=True, slots=True)
class Row:
    """An object in the catalogue. `allocated` is in bytes, times are in seconds since 1970."""

    number: int
    label: Label
    allocated: int
    used: float
    pinned: bool
    uses: int


@dataclass(frozen=True, slots=True)
class Note:
    """A small value under `key`. It is kept as long as the block `block` is there."""

    key: bytes
    block: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The model of a fingerprint, for display only.

    Attributes:
        file: path of the weights.
        mark: a text that changes when the file changes; "" if there is no file.
    """

    name: str
    file: str
    mark: str

    @classmethod
    def of(cls, name: str, file: str) -> StoredModel:
        """The model with the present mark of its file."""
        try:
            found = os.stat(file)
        except (OSError, ValueError):
            return cls(name, file, "")
        return cls(name, file, f"{found.st_size} {found.st_mtime_ns}")

    @property
    def at_hand(self) -> bool:
        """Whether the file is there and unchanged."""
        return bool(self.mark) and self.of(self.name, self.file) == self


class Catalog:
    """A connection to the catalogue. For one thread at a time. See `schema.connect`.

    Raises:
        sqlite3.Error: it cannot be opened, is damaged, or of a later version.
    """

    def __init__(
        self,
        path: Path,
        alone: schema.Alone = lambda _: nullcontext(),
        *,
        creates: bool = True,
        same: Callable[[], None] = lambda: None,
    ) -> None:
        self._db = schema.connect(path, alone, creates=creates, same=same)
        self.ranks = Ranks(self._db)
        self.ages = Ages(self._db, self.ranks)
        self._held: tuple[int, Collection[bytes], Counter[bytes]] = -1, (), Counter()  # `pins`, what they keep, and whose it is

    def close(self) -> None:
        self._db.close()

    def refuse_later(self) -> None:
        """Raises sqlite3.NotSupportedError if a process of a later version has converted it meanwhile."""
        schema.known_version(self._db)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A transaction that no other connection can interrupt."""
        with schema.change(self._db):
            yield

    def add(self, objects: Iterable[tuple[Label, int]], now: float | None = None) -> None:
        """Adds objects with their allocated bytes, in one transaction. They replace those that are there."""
        now = time.time() if now is None else now
        with self._change():
            values, changed = [], []
            for label, allocated in objects:
                there = self._db.execute("SELECT canonical FROM objects WHERE key = ?", (label.key,)).fetchone()
                if there is not None and there[0] != label.canonical:
                    changed.append(label.key)
                stats = self._revived(label.key, now)
                stats.saved_per_byte = max(label.seconds, 1e-9) / max(1, allocated)
                values.append(
                    (
                        *(label.key, label.parent, label.fingerprint, label.start, _packed(label.tokens)),
                        *(int(label.canonical), label.seconds, allocated, stats.last, stats.uses, label.kind),
                        *(stats.request_traits.bucket, stats.request_traits.weight, label.written or now, label.owner),
                        self.ranks.of(stats, now),
                    )
                )
            self._db.executemany(
                "INSERT INTO objects (key, parent, fingerprint, start, tokens, canonical, seconds, allocated, used,"
                " uses, kind, bucket, weight, written, owner, rank)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (key) DO UPDATE SET canonical = excluded.canonical, allocated = excluded.allocated",
                values,
            )
            for key in changed:  # other processes must see them as new
                self._db.execute("UPDATE sqlite_sequence SET seq = seq + 1 WHERE name = 'objects'")
                query = "UPDATE objects SET number = (SELECT seq FROM sqlite_sequence WHERE name = 'objects') WHERE key = ?"
                self._db.execute(query, (key,))

    def remove(self, keys: Collection[bytes], now: float | None = None) -> None:
        """Removes objects, and leaves ghosts of them."""
        now = time.time() if now is None else now
        with self._change():
            self._db.executemany(
                f"INSERT OR REPLACE INTO ghosts (key, {USED}, written, owner)"
                f" SELECT key, {USED}, written, owner FROM objects WHERE key = ?",
                [(key,) for key in keys],
            )
            parents = [parent for (parent,) in rows_of(self._db, "parent", [*keys])]
            self._db.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in keys])
            self.ranks.renew_leaves(parents, now)
            self._db.executemany("DELETE FROM notes WHERE block = ?", [(key,) for key in keys])
            oldest = "FROM ghosts WHERE number <= (SELECT MAX(number) FROM ghosts) - ?"
            gone = self._db.execute(f"SELECT {USED} {oldest}", (GHOSTS,)).fetchall()
            self.ranks.count(1, ((stats_of(used), now) for used in gone))
            self._db.execute(f"DELETE {oldest}", (GHOSTS,))

    def ghosts(self, keys: Collection[bytes]) -> set[bytes]:
        """The keys that have a ghost: these objects were evicted, not deleted by a user."""
        return {key for key in keys if self._ghost(key) is not None}

    def use(self, uses: Collection[tuple[bytes, float]]) -> None:
        """Counts uses. `uses`: keys with times, the earlier use of a key first."""
        with self._change():
            found = self._histories([key for key, _ in uses])

            def intervals() -> Iterator[tuple[ReuseStats, float]]:
                for key, now in uses:
                    if (known := found.get(key)) is not None:
                        yield known[1], now
                        known[1].use(now)

            self.ranks.count(0, intervals())
            values = [(stats.last, stats.uses, self.ranks.of(stats, stats.last), row) for row, stats in found.values()]
            self._db.executemany("UPDATE objects SET used = ?, uses = ?, rank = ? WHERE number = ?", values)

    def replied(self, replies: Collection[tuple[bytes, RequestTraits]], now: float | None = None) -> None:
        """Records the traits of the latest requests. `replies`: keys with traits, the later of a key last."""
        now = time.time() if now is None else now
        with self._change():
            latest = dict(replies)
            alike: dict[RequestTraits, list[bytes]] = {}
            for key, request_traits in latest.items():
                alike.setdefault(request_traits, []).append(key)
            for request_traits, keys in alike.items():
                for some, places in keys_of(keys):
                    values = request_traits.bucket, request_traits.weight, *some
                    self._db.execute(f"UPDATE objects SET bucket = ?, weight = ? WHERE key IN ({places})", values)
            self.ranks.renew_leaves([*latest], now)

    def _histories(self, keys: Sequence[bytes]) -> dict[bytes, tuple[int, ReuseStats]]:
        """The numbers and statistics of objects, by key."""
        found = rows_of(self._db, f"key, number, seconds, allocated, {USED}", keys)
        return {key: (number, stats_of(used, seconds, allocated)) for key, number, seconds, allocated, *used in found}

    def note(
        self, fingerprint: bytes, notes: Collection[Note], now: float | None = None, since: tuple[float, int] | None = None
    ) -> None:
        """Stores notes, and replaces those with the same keys. `since`: do so only if `Ages.wiped` still returns this."""
        now = time.time() if now is None else now
        with self._change():
            if since is not None and self.ages.wiped() != since:
                return
            self._db.executemany(
                "INSERT OR REPLACE INTO notes (fingerprint, key, block, value, written) VALUES (?, ?, ?, ?, ?)",
                [(fingerprint, note.key, note.block, note.value, now) for note in notes],
            )
            self._db.execute("DELETE FROM notes WHERE number <= (SELECT MAX(number) FROM notes) - ?", (NOTES,))

    def notes(self, fingerprint: bytes, after: int = 0, most: int = -1) -> Iterator[tuple[int, Note]]:
        """Notes of a fingerprint after number `after`, with their numbers, oldest first. `most`: of them; -1 for all."""
        query = "SELECT number, key, block, value FROM notes WHERE number > ? AND fingerprint = ? ORDER BY number LIMIT ?"
        for number, *note in self._db.execute(query, (after, fingerprint, most)):
            if not all(isinstance(one, bytes) for one in note):
                raise sqlite3.DatabaseError("a note that headstart did not write")
            yield number, Note(*note)

    def learn(self, fingerprint: bytes, model: StoredModel) -> None:
        """Stores the model of a fingerprint."""
        if self.models().get(fingerprint) != model:
            with self._change():
                values = fingerprint, model.name, model.file, model.mark
                self._db.execute("INSERT OR REPLACE INTO models (fingerprint, name, file, mark) VALUES (?, ?, ?, ?)", values)

    def models(self) -> dict[bytes, StoredModel]:
        """The models of fingerprints."""
        found = self._db.execute("SELECT fingerprint, name, file, mark FROM models").fetchall()
        return {bytes(fingerprint): StoredModel(*map(str, values)) for fingerprint, *values in found}

    def _ghost(self, key: bytes) -> ReuseStats | None:
        """The statistics of an object that was evicted, without what it would save."""
        found = self._db.execute(f"SELECT {USED} FROM ghosts WHERE key = ?", (key,)).fetchone()
        return None if found is None else stats_of(found)

    def _revived(self, key: bytes, now: float) -> ReuseStats:
        """The statistics of an object that is added now. They continue those of its ghost, which is removed."""
        stats = self._ghost(key)
        if stats is None:
            return ReuseStats(1.0, now, 1)
        self._db.execute("DELETE FROM ghosts WHERE key = ?", (key,))
        self.ranks.count(0, [(stats, now)])
        stats.use(now)
        return stats

    def pin(self, keys: Collection[bytes]) -> None:
        """Protects objects from eviction."""
        with self._change():
            self._db.executemany("UPDATE objects SET pinned = 1 WHERE key = ?", [(key,) for key in keys])

    def unpin(self, keys: Collection[bytes]) -> None:
        """Removes this protection, except from what other pinned objects continue: others may have pinned these since.

        A block stays pinned with its checkpoint, or neither does.
        """
        with self._change():
            labels = [row.label for key in keys if (row := self.get(key)) is not None]
            labels.sort(key=lambda label: -label.start)  # each before its parent
            blocks = {label.key for label in labels if label.kind == KV}
            states = {label.parent: label.key for label in labels if label.kind == STATE}
            above = dict.fromkeys(label.key if label.kind == KV else label.parent for label in labels)
            self._db.executemany(
                "UPDATE objects SET pinned = 0 WHERE pinned AND key IN (:block, :state) AND NOT EXISTS"
                " (SELECT 1 FROM objects AS after WHERE after.parent = :above AND after.pinned AND after.key != :state)",
                # b"" is the key of nothing
                [{"above": key, "block": key if key in blocks else b"", "state": states.get(key, b"")} for key in above],
            )

    def pinned(self, fingerprint: bytes) -> frozenset[bytes]:
        """Keys of the pinned objects of a fingerprint."""
        query = "SELECT key FROM objects WHERE pinned AND +fingerprint = ?"  # `+`: by the index of pins
        return frozenset(key for (key,) in self._db.execute(query, (fingerprint,)))

    def pins(self) -> int:
        """A number that changes when pinned objects do."""
        return self._total("pins")

    def pinned_bytes(self) -> dict[bytes, int]:
        """Bytes of the pinned objects, by owner."""
        return dict(self._db.execute("SELECT owner, pinned FROM owned WHERE pinned").fetchall())

    def children(self, key: bytes) -> set[bytes]:
        """Keys of the objects whose parent is this one."""
        return {child for (child,) in self._db.execute("SELECT key FROM objects WHERE parent = ?", (key,))}

    def get(self, key: bytes) -> Row | None:
        return next(self._rows("WHERE key = ?", key), None)

    def rows(self, fingerprint: bytes | None = None, after: int = 0, most: int = -1) -> Iterator[Row]:
        """Objects of a fingerprint (or all) after number `after`, oldest first. `most`: of them; -1 for all."""
        if fingerprint is None:
            return self._rows("WHERE number > ? ORDER BY number LIMIT ?", after, most)
        return self._rows("WHERE fingerprint = ? AND number > ? ORDER BY number LIMIT ?", fingerprint, after, most)

    def foreign(self, fingerprint: bytes) -> dict[bytes, set[bytes]]:
        """Keys of the first blocks of chains with other fingerprints, by fingerprint. The set may be empty.

        Of each fingerprint, at most the latest `FIRST` are found.
        """
        others = self._db.execute("SELECT fingerprint FROM made WHERE fingerprint != ?", (fingerprint,)).fetchall()
        query = "SELECT key FROM objects WHERE fingerprint = ? AND start = 0 AND kind = 'rows' ORDER BY number DESC LIMIT ?"
        return {other: {key for (key,) in self._db.execute(query, (other, FIRST))} for (other,) in others}

    def keys(self) -> set[bytes]:
        return {key for (key,) in self._db.execute("SELECT key FROM objects")}

    def without_row(self, keys: Collection[bytes]) -> set[bytes]:
        """Those of these keys that are not in the catalogue."""
        return {*keys}.difference(key for (key,) in rows_of(self._db, "key", [*keys]))

    def sizes(self, after: bytes, most: int) -> list[tuple[bytes, int, bool]]:
        """Keys after `after`, in order, with their allocated bytes and whether they are canonical."""
        query = "SELECT key, allocated, canonical FROM objects WHERE key > ? ORDER BY key LIMIT ?"
        return [(key, allocated, bool(canonical)) for key, allocated, canonical in self._db.execute(query, (after, most))]

    def removals(self) -> tuple[int, int]:
        """The number of deletions that have left no ghost, and the number of the latest ghost ever."""
        found = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'ghosts'").fetchone()
        return self._total("erased"), 0 if found is None else int(found[0])

    def ghosts_after(self, number: int, most: int) -> list[tuple[int, bytes]]:
        """Ghosts after a number, with their numbers, oldest first."""
        return self._db.execute(
            "SELECT number, key FROM ghosts WHERE number > ? ORDER BY number LIMIT ?", (number, most)
        ).fetchall()

    def owners(self, labels: Iterable[Label]) -> dict[bytes, bytes]:
        """The owners of objects, by key. `labels`: parents first."""
        found: dict[bytes, bytes] = {}
        for label in labels:
            owner = label.owner or found.get(label.parent, b"")
            if not owner and (above := self._above(label.parent)) is not None:
                owner = above[2]
            elif not owner and label.start == 0 and label.kind == KV:
                owner = owner_of(label.parent)  # the parent is a root, which names the owner
            found[label.key] = owner
        return found

    def _above(self, key: bytes) -> tuple[bytes, int, bytes] | None:
        """The parent of an object, its allocated bytes, and its owner."""
        found: tuple[bytes, int, bytes] | None = self._db.execute(
            "SELECT parent, allocated, owner FROM objects WHERE key = ?", (key,)
        ).fetchone()
        return found

    def victims(
        self,
        spare: Collection[bytes],
        need: int,
        now: float | None = None,
        shares: OwnerLimits | None = None,
        coming: Collection[bytes] = (),
        most: int | None = None,
    ) -> list[Row]:
        """Objects to evict so that `need` bytes become free, in the order of `prefix_cache/eviction_order`.

        Pinned objects stay, so it may be less. In models with state, KV that has waited long for a checkpoint goes first.

        Args:
            spare: objects that stay too.
            shares: counts what each owner will hold of new objects. It counts the stored ones too, of all owners who matter.
            coming: the owners of new objects.
            most: objects.
        """
        now = time.time() if now is None else now
        found = self.ranks.victims(spare, need, now, NoQuota() if shares is None else shares, coming, most)
        return [row for key in found if (row := self.get(key)) is not None]

    def kept(self, spare: Collection[bytes], shares: OwnerLimits | None = None) -> int:
        """Bytes that `victims` never frees: objects that are pinned or in `spare`, and all their ancestors.

        `shares` counts them for their owners.
        """
        if (pins := self.pins()) != self._held[0]:
            pinned = [key for (key,) in self._db.execute("SELECT key FROM objects WHERE pinned")]
            held = self._with_ancestors(pinned, ())
            self._held = pins, held.keys(), _by_owner(held)
        _, known, total = self._held
        kept = total + _by_owner(self._with_ancestors(spare, known))
        if shares is not None:
            for owner, size in kept.items():
                shares.hold(owner, size)
        return kept.total()

    def _with_ancestors(self, keys: Collection[bytes], known: Collection[bytes]) -> dict[bytes, tuple[bytes, int]]:
        """The owners and bytes of objects and all their ancestors, except those that are `known` with their ancestors."""
        found: dict[bytes, tuple[bytes, int]] = {}
        for key in keys:
            while key not in found and key not in known and (above := self._above(key)) is not None:
                parent, size, owner = above
                found[key] = owner, size
                key = parent
        return found

    def version(self) -> tuple[int, int]:
        """Two numbers: the first changes when other connections write, the second when this one does."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0]), self._db.total_changes

    def used(self) -> int:
        """Bytes that all objects occupy."""
        return self._total("bytes")

    def __len__(self) -> int:
        return self._total("objects")

    def _total(self, column: str) -> int:
        return int(self._db.execute(f"SELECT {column} FROM totals").fetchone()[0])

    def read(self) -> None:
        """Reads all rows, which shows whether they are damaged."""
        self._db.execute("SELECT SUM(allocated) FROM objects").fetchone()

    def recount(self) -> None:
        """Counts all objects, and corrects the totals. It reads the whole table."""
        with self._change():
            if not schema.recount(self._db):
                log.warning("the totals of the catalogue were wrong, and are right now")

    def _rows(self, where: str, *values: object) -> Iterator[Row]:
        return _read(self._db, where, *values)


def look_up(path: Path, keys: Sequence[bytes]) -> list[Row]:
    """The rows of these objects, over a connection of its own: another thread may be busy with a `Catalog`.

    The search ends at `TOGETHER` keys of which none has a row.

    Raises:
        sqlite3.Error, ValueError, TypeError: the catalogue cannot be read.
    """
    found: list[Row] = []
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", timeout=0.1, uri=True)) as database:
        for some, places in keys_of(keys):
            rows = list(_read(database, f"WHERE key IN ({places})", *some))
            if not rows:
                break
            found += rows
    return found


def _read(database: sqlite3.Connection, where: str, *values: object) -> Iterator[Row]:
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
    ) in database.execute(query, values):
        ids = all(isinstance(one, bytes) and len(one) == 32 for one in (key, parent, fingerprint))
        if not (ids and isinstance(start, int) and kind in get_args(EntryKind) and isinstance(owner, bytes)):
            raise sqlite3.DatabaseError("a row that headstart did not write")
        label = Label(
            *(key, parent, fingerprint, start, _unpacked(tokens), bool(canonical)), seconds, kind, float(written), owner
        )
        allocated, used, pinned, uses = rest
        yield Row(number, label, allocated, used, bool(pinned), uses)


def _by_owner(held: Mapping[bytes, tuple[bytes, int]]) -> Counter[bytes]:
    total = Counter[bytes]()
    for owner, size in held.values():
        total[owner] += size
    return total


def _packed(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def _unpacked(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, "<i4").tolist())
