"""Ages: what the catalogue has kept for long enough, and what is erased from it, so that nothing of it is left.

For one thread at a time. Times are seconds since 1970.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping

from headstart.core.terms import Terms
from headstart.stores.disk import schema


class Ages:
    """All methods raise sqlite3.Error."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database

    def due(self, terms: Terms, now: float) -> set[bytes]:
        """Keys of the objects that have been kept for long enough."""
        found: set[bytes] = set()
        for owner, time in terms.cuts(now):
            whose, values = ("", (time,)) if owner is None else ("AND owner = ?", (time, owner))
            found.update(key for (key,) in self._db.execute(f"SELECT key FROM objects WHERE written <= ? {whose}", values))
        return found

    def old(self, before: float) -> set[bytes]:
        """Keys of the objects that were written by then."""
        return {key for (key,) in self._db.execute("SELECT key FROM objects WHERE written <= ?", (before,))}

    def fade(self, terms: Terms, now: float) -> None:
        """Forgets what has been kept for long enough of what is known beside objects: how they were used, and notes."""
        with schema.change(self._db):
            for owner, time in terms.cuts(now):
                values: tuple[object, ...] = (time,)
                gone = noted = ""
                if owner is not None:
                    values, gone = (time, owner), "AND owner = ?"
                    noted = "AND block IN (SELECT key FROM objects WHERE owner = ?)"
                    if not owner:
                        noted = "AND block NOT IN (SELECT key FROM objects WHERE owner != ?)"
                self._db.execute(f"DELETE FROM gone WHERE written <= ? {gone}", values)
                self._db.execute(f"DELETE FROM notes WHERE written <= ? {noted}", values)

    def erase(self, keys: Collection[bytes]) -> None:
        """Forgets objects, how they were used, and notes beside them."""
        with schema.change(self._db):
            self._erase(keys)

    def _erase(self, keys: Collection[bytes]) -> None:
        for query in ("objects WHERE key = ?", "gone WHERE key = ?", "notes WHERE block = ?"):
            self._db.executemany(f"DELETE FROM {query}", [(key,) for key in keys])

    def wipe(self, keys: Collection[bytes], before: float) -> None:
        """The same by somebody's wish, which is kept, so that running servers forget these too. Also what is known of objects
        that went earlier and were written `before`.
        """
        with schema.change(self._db):
            self._erase(keys)
            self._db.execute("DELETE FROM gone WHERE written <= ?", (before,))
            stay = "SELECT key FROM objects WHERE pinned"
            self._db.execute(f"DELETE FROM notes WHERE written <= ? AND block NOT IN ({stay})", (before,))
            self._db.execute("DELETE FROM models WHERE fingerprint NOT IN (SELECT fingerprint FROM objects)")
            last, times = self.wiped()
            values = max(before, last), times + 1
            self._db.execute("INSERT OR REPLACE INTO erased (id, before, times) VALUES (1, ?, ?)", values)

    def wiped(self) -> tuple[float, int]:
        """Up to when somebody has deleted all that was written, 0 if nobody has; how often anybody has deleted anything."""
        found = self._db.execute("SELECT before, times FROM erased").fetchone()
        return (float(found[0]), int(found[1])) if found else (0.0, 0)

    def scrub(self) -> None:
        """Leaves nothing of what was deleted in the files. SQLite overwrites it (`schema.connect`), but not what lies about in
        pages whose rows it has moved. Takes about a second for a hundred thousand objects. Raises OperationalError if others
        are at it for too long.
        """
        self._db.execute("VACUUM")
        busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            error = sqlite3.OperationalError("another process reads the catalogue for too long")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error

    def terms(self) -> dict[bytes, float]:
        """The terms of owners that have one of their own."""
        return {bytes(owner): float(seconds) for owner, seconds in self._db.execute("SELECT owner, seconds FROM terms")}

    def keep(self, terms: Mapping[bytes, float]) -> None:
        """Remembers these terms, in place of those."""
        if terms != self.terms():
            with schema.change(self._db):
                self._db.execute("DELETE FROM terms")
                self._db.executemany("INSERT INTO terms (owner, seconds) VALUES (?, ?)", terms.items())
