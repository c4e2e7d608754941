"""Ages: what the catalogue has kept for long enough, and what is erased from it, so that nothing of it is left.

For one thread at a time. Times are seconds since 1970.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping

from headstart.prefix_cache.expiry import Terms
from headstart.tiers.disk import schema


class Ages:
    """All methods raise sqlite3.Error."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database

    def due(self, terms: Terms, now: float) -> set[bytes]:
        """Keys of the objects that have been kept for long enough."""
        found: set[bytes] = set()
        # By the owners that are here, not by those that have a term: there may be very many of these.
        for owner, oldest in self._db.execute("SELECT owner, MIN(written) FROM objects GROUP BY owner").fetchall():
            if oldest <= (cut := terms.cut(owner, now)):
                query = "SELECT key FROM objects WHERE owner = ? AND written <= ?"
                found.update(key for (key,) in self._db.execute(query, (owner, cut)))
        return found

    def old(self, before: float) -> set[bytes]:
        """Keys of the objects that were written by then."""
        return {key for (key,) in self._db.execute("SELECT key FROM objects WHERE written <= ?", (before,))}

    def fade(self, terms: Terms, now: float) -> None:
        """Forgets what has been kept for long enough of what is known beside objects: how they were used, and notes."""
        owner = "COALESCE((SELECT owner FROM objects WHERE key = block), x'')"  # of a note's block, if it is there
        with schema.change(self._db):
            for table, whose in (("gone", "owner"), ("notes", owner)):
                query = f"SELECT number, {whose}, written FROM {table}"
                old = [(number,) for number, owner, written in self._db.execute(query) if written <= terms.cut(owner, now)]
                if old:
                    schema.soil(self._db)
                    self._db.executemany(f"DELETE FROM {table} WHERE number = ?", old)

    def erase(self, keys: Collection[bytes]) -> None:
        """Forgets objects, how they were used, and notes beside them."""
        if keys:
            with schema.change(self._db):
                self._erase(keys)

    def _erase(self, keys: Collection[bytes]) -> None:
        schema.soil(self._db)
        for query in ("objects WHERE key = ?", "gone WHERE key = ?", "notes WHERE block = ?"):
            self._db.executemany(f"DELETE FROM {query}", [(key,) for key in keys])

    def wipe(self, keys: Collection[bytes], before: float, now: float) -> None:
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
            values = max(before, last if last <= now else 0.0), times + 1  # the clock may have been set back
            self._db.execute("INSERT OR REPLACE INTO erased (id, before, times) VALUES (1, ?, ?)", values)

    def wiped(self) -> tuple[float, int]:
        """Up to when somebody has deleted all that was written, 0 if nobody has; how often anybody has deleted anything."""
        found = self._db.execute("SELECT before, times FROM erased").fetchone()
        return (float(found[0]), int(found[1])) if found else (0.0, 0)

    @property
    def clean(self) -> bool:
        """Whether nothing is left in the files of what was deleted. After a crash it may be."""
        return schema.clean(self._db)

    def scrub(self) -> None:
        """Leaves nothing of what was deleted in the files, unless others read them for too long: see `clean`. Takes about a
        second for a hundred thousand objects.
        """
        schema.scrub(self._db)

    def terms(self) -> dict[bytes, float]:
        """The terms of owners that have one of their own."""
        return {bytes(owner): float(seconds) for owner, seconds in self._db.execute("SELECT owner, seconds FROM terms")}

    def keep(self, terms: Mapping[bytes, float | None]) -> None:
        """Remembers these owners' terms; None for that of everybody. Other owners', which other processes know, stay."""
        if terms:
            with schema.change(self._db):
                self._db.executemany("DELETE FROM terms WHERE owner = ?", [(owner,) for owner in terms])
                given = [(owner, seconds) for owner, seconds in terms.items() if seconds is not None]
                self._db.executemany("INSERT INTO terms (owner, seconds) VALUES (?, ?)", given)
