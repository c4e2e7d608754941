"""Ages: finds expired objects in the catalogue, and deletes rows so that no trace of them is left.

For one thread at a time. Times are seconds since 1970.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping

from headstart.prefix_cache.expiry import Terms, outlived
from headstart.tiers.disk import schema
from headstart.tiers.disk.ranks import Ranks, rows_of

TOMBSTONES = 1024
"""Most tombstones that are kept: the latest. A server that has not seen all later ones takes everybody's for deleted."""
TOMBSTONE_TERM = 86_400.0
"""Most seconds for which one is kept."""
OWNERS = 64
"""Most owners of one deletion of whom each gets a tombstone. If there are more, there is one for everybody."""
_NOBODY = b"nobody"
"""An owner who has no term of his own: other owners' names are longer."""


class Ages:
    """All methods raise sqlite3.Error.

    Attributes:
        own: how many times this process has deleted rows without a ghost. It knows which.
        seen: the number of the latest ghost that this process knows.
        own_tombstones: the numbers of those of the latest deletion that this process has recorded.
    """

    def __init__(self, database: sqlite3.Connection, ranks: Ranks) -> None:
        self._db = database
        self._ranks = ranks
        self.own = self.seen = 0
        self.own_tombstones = range(0)
        self._terms_seen: tuple[int, float, float] = (-1, 0.0, 0.0)

    def due(self, terms: Terms, now: float, owner: bytes | None, most: int) -> list[bytes]:
        """Up to `most` keys of expired objects, the oldest first.

        Args:
            owner: whose objects; None for those that are older than everybody's term.
        """
        whose, before = ("", terms.cut(_NOBODY, now)) if owner is None else ("owner = ? AND", terms.cut(owner, now))
        query = f"SELECT key FROM objects WHERE {whose} written <= ? ORDER BY written LIMIT ?"
        return [key for (key,) in self._db.execute(query, (*(() if owner is None else (owner,)), before, most))]

    def owners(self, after: bytes | None, most: int) -> list[bytes]:
        """Owners of objects, in order, behind `after`; None for the first ones."""
        query = "SELECT owner FROM owned WHERE ? IS NULL OR owner > ? ORDER BY owner LIMIT ?"
        return [bytes(owner) for (owner,) in self._db.execute(query, (after, after, most))]

    def old(self, before: float) -> set[bytes]:
        """Keys of the objects that were written up to the time `before`."""
        return {key for (key,) in self._db.execute("SELECT key FROM objects WHERE written <= ?", (before,))}

    def fade(self, terms: Terms, now: float, most: int) -> Iterator[None]:
        """Deletes expired ghosts, notes and tombstones, in pieces of up to `most`. Others may write between two pieces."""
        owner = "COALESCE((SELECT owner FROM objects WHERE key = block), x'')"  # the owner of a note's block, if that is there
        for table, whose in (("ghosts", "owner"), ("notes", owner)):
            query = f"SELECT number, {whose}, written FROM {table} WHERE number > ? AND written <= ? ORDER BY number LIMIT ?"
            last = 0
            while rows := self._db.execute(query, (last, terms.cut(b"", now), most)).fetchall():  # nobody's term is shorter
                last = rows[-1][0]
                if old := [(number,) for number, owner, written in rows if written <= terms.cut(owner, now)]:
                    with schema.change(self._db):
                        schema.soil(self._db)
                        self._erasure()
                        self._db.executemany(f"DELETE FROM {table} WHERE number = ?", old)
                    self.own += table == "notes" or old[-1][0] <= self.seen
                yield
        self.outdate_tombstones(terms.cut(b"", now))

    def erase(self, keys: Collection[bytes], now: float | None = None) -> None:
        """Deletes the rows of objects, their ghosts and their notes."""
        if keys:
            with schema.change(self._db):
                self._erase(keys, time.time() if now is None else now)
            self.own += 1

    def _erase(self, keys: Collection[bytes], now: float) -> None:
        schema.soil(self._db)
        self._erasure()
        stay = {parent for (parent,) in rows_of(self._db, "parent", [*keys])}.difference(keys)
        for query in ("objects WHERE key = ?", "ghosts WHERE key = ?", "notes WHERE block = ?"):
            self._db.executemany(f"DELETE FROM {query}", [(key,) for key in keys])
        self._ranks.renew_leaves(sorted(stay), now)

    def _erasure(self) -> None:
        """Other processes must look for what is gone."""
        self._db.execute("UPDATE totals SET erased = erased + 1")

    def wipe(self, keys: Collection[bytes], before: float, now: float, owners: Collection[bytes] = ()) -> None:
        """Does the same on request of a user, and records the request, so that running servers forget the objects too.

        It also deletes ghosts and notes that were written up to the time `before`.

        Args:
            owners: of deleted entries, also of those that were never on disk. Each gets a tombstone.
        """
        tombstones = range(0)
        with schema.change(self._db):
            self._erase(keys, now)
            self._db.execute("DELETE FROM ghosts WHERE written <= ?", (before,))
            stay = "SELECT key FROM objects WHERE pinned"
            self._db.execute(f"DELETE FROM notes WHERE written <= ? AND block NOT IN ({stay})", (before,))
            self._db.execute("DELETE FROM models WHERE fingerprint NOT IN (SELECT fingerprint FROM made)")
            last, times = self.wiped()
            last = last if last <= now else 0.0  # the clock may have been set back
            if before > -math.inf:  # a new time, or running servers that have obeyed the last one would not hear of this one
                last = max(before, math.nextafter(last, math.inf))
            self._db.execute("INSERT OR REPLACE INTO erased (id, before, times) VALUES (1, ?, ?)", (last, times + 1))
            if owners:
                tombstones = self._bury(owners, now)
        self.own_tombstones = tombstones
        self.own += not before > -math.inf  # with a time, it also deletes ghosts that nobody may have seen

    def wiped(self) -> tuple[float, int]:
        """The time up to which a user has deleted everything (0 if never), and the number of all such deletions."""
        found = self._db.execute("SELECT before, times FROM erased").fetchone()
        return (float(found[0]), int(found[1])) if found else (0.0, 0)

    def _bury(self, owners: Collection[bytes], now: float) -> range:
        """Adds tombstones, and drops the oldest ones. Returns the numbers of the new ones."""
        first = self.last_tombstone() + 1
        rows = [(owner, now) for owner in sorted({*owners} if len(owners) <= OWNERS else {b""})]
        self._db.executemany("INSERT INTO tombstones (owner, written) VALUES (?, ?)", rows)
        last = first + len(rows) - 1
        self._db.execute("DELETE FROM tombstones WHERE number <= ?", (last - TOMBSTONES,))
        return range(first, last + 1)

    def last_tombstone(self) -> int:
        """The number of the latest tombstone ever. Numbers have no gaps."""
        found = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'tombstones'").fetchone()
        return 0 if found is None else int(found[0])

    def owners_between(self, seen: int, last: int, own: Collection[int] = ()) -> frozenset[bytes] | None:
        """Of whom something was deleted after the tombstone with number `seen`, up to the one with number `last`.

        None if it may be anybody: some of these tombstones are gone, or the catalogue is a new one. Those that are `own` do not
        count.
        """
        query = "SELECT number, owner FROM tombstones WHERE number > ? AND number <= ? ORDER BY number"
        rows = [(number, bytes(owner)) for number, owner in self._db.execute(query, (seen, last)) if number not in own]
        wanted = last - seen - sum(seen < number <= last for number in own)
        owners = frozenset(owner for _, owner in rows)
        return None if last < seen or len(rows) < wanted or b"" in owners else owners

    def outdate_tombstones(self, before: float) -> None:
        """Deletes the tombstones up to the last one that was written up to the time `before`."""
        query = "FROM tombstones WHERE number <= (SELECT MAX(number) FROM tombstones WHERE written <= ?)"
        if self._db.execute(f"SELECT 1 {query} LIMIT 1", (before,)).fetchone() is not None:
            self._db.execute(f"DELETE {query}", (before,))

    def recall(self, before: float) -> None:
        """Records such a request again, if none is recorded."""
        with schema.change(self._db):
            self._db.execute("INSERT OR IGNORE INTO erased (id, before, times) VALUES (1, ?, 1)", (before,))

    @property
    def clean(self) -> bool:
        """Whether no deleted text is left in the files. After a crash, some may be."""
        return schema.clean(self._db)

    def scrub(self) -> None:
        """Removes all deleted text from the files. If other processes read them for too long, some is left: see `clean`.

        It takes about a second for a hundred thousand objects.
        """
        schema.scrub(self._db)

    def terms(self) -> dict[bytes, float]:
        """The terms of owners that have their own."""
        return {bytes(owner): float(seconds) for owner, seconds in self._db.execute("SELECT owner, seconds FROM terms")}

    def agree(self, terms: Mapping[bytes, float | None], now: float) -> dict[bytes, float] | None:
        """Does `keep`, and returns the terms of all owners; None if only this call has changed some since the last one."""
        if not terms and self._terms_mark() == self._terms_seen:
            return None
        with schema.change(self._db):
            others = self._terms_mark() != self._terms_seen
            self._keep(terms, now)
            self._terms_seen = self._terms_mark()
            return self.terms() if others else None

    def _terms_mark(self) -> tuple[int, float, float]:
        """Changes when terms do, or when they are kept again: their number, their sum, and when that was."""
        query = "SELECT COUNT(*), TOTAL(seconds), (SELECT TOTAL(at) FROM given) FROM terms"
        count, total, given = self._db.execute(query).fetchone()
        return count, total, given

    def keep(self, terms: Mapping[bytes, float | None], now: float) -> None:
        """Stores the terms of these owners; None removes one. The terms of other owners stay."""
        if terms:
            with schema.change(self._db):
                self._keep(terms, now)

    def _keep(self, terms: Mapping[bytes, float | None], now: float) -> None:
        self._db.executemany("DELETE FROM terms WHERE owner = ?", [(owner,) for owner in terms])
        given = [(owner, seconds) for owner, seconds in terms.items() if seconds is not None]
        self._db.executemany("INSERT INTO terms (owner, seconds) VALUES (?, ?)", given)
        self._db.executemany("INSERT OR REPLACE INTO given (owner, at) VALUES (?, ?)", [(who, now) for who, _ in given])

    def forget_terms(self, now: float) -> None:
        """Deletes the terms of owners that have no objects or ghosts here, and can have none elsewhere."""
        with schema.change(self._db):
            # Older releases did not note when.
            self._db.execute("INSERT OR IGNORE INTO given (owner, at) SELECT owner, ? FROM terms", (now,))
            over = "SELECT owner FROM terms JOIN given USING (owner) WHERE at + 2 * seconds + ? <= ?"  # `outlived`
            held = "SELECT owner FROM owned UNION SELECT owner FROM ghosts"
            query = f"DELETE FROM terms WHERE owner IN ({over}) AND owner NOT IN ({held})"
            self._db.execute(query, (outlived(0.0, 0.0), now))
            self._db.execute("DELETE FROM given WHERE owner NOT IN (SELECT owner FROM terms)")
