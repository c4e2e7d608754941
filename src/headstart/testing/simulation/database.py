"""Database: a stand-in for `sqlite3`. The catalogue is a real database in a real folder, which a power failure rolls back.

SQLite promises with `journal_mode=WAL` and `synchronous=FULL`: each transaction whose commit has returned stays. A transaction
that a power failure interrupts is there as a whole, or not at all, and the log may be torn. So a failure between two
statements leaves the files as they are, because SQLite has synced them. A failure during a commit leaves one of these states,
as the dice say: no byte of the commit, some of the sectors that it has written, or all of it.

With `synchronous=NORMAL` a commit is synced by a later one with FULL. A failure until then leaves one of these states too.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from headstart.testing.simulation.disk import SECTOR
from headstart.testing.simulation.faults import CRASHES, SQL_CODES, sql_error
from headstart.testing.simulation.filesystem import FileSystem, system
from headstart.testing.simulation.kernel import world
from headstart.testing.simulation.threads import StandIn

BUSY = 5.0
"""Seconds for which a connection waits for another one's transaction."""
SECONDS = 1e-4
"""Most virtual seconds of a statement."""
SYNC = 5e-3
"""Most virtual seconds of a commit."""
LOG_HEADER = 32
"""Bytes of the header of a log (https://sqlite.org/fileformat2.html#the_write_ahead_log)."""

_execute, _executemany = sqlite3.Connection.execute, sqlite3.Connection.executemany


class Connection(sqlite3.Connection):
    """A connection whose statements take virtual time and meet faults."""

    dead = False
    lazy = False  # whether `synchronous` is NORMAL
    _before = 0  # rows that it had changed when the transaction began

    def execute(self, sql: str, *values: Any) -> Any:
        return self._statement(sql, partial(_execute, self, sql, *values))

    def executemany(self, sql: str, values: Any) -> Any:
        return self._statement(sql, partial(_executemany, self, sql, list(values)))

    def _statement(self, sql: str, run: Callable[[], sqlite3.Cursor]) -> Any:
        self._check()
        selects = sql.startswith(("SELECT", "WITH"))
        # A catalogue is created in a transaction. Outside of one, tables that are there are not created again.
        reads = selects or sql.startswith(("PRAGMA", "CREATE"))
        here = world()
        if here.trace is not None:
            here.say(f"sql {sql[:100]!r}")
        if sql.startswith("BEGIN"):
            self._before = self.total_changes
        try:
            if reads or self.in_transaction or sql.startswith("BEGIN"):
                self._meet("select" if reads else "change")
                here.pause(SECONDS)
                done = self._patiently(run)
                if sql.startswith("PRAGMA synchronous="):
                    self.lazy = sql.endswith("NORMAL")
                elif sql.startswith("PRAGMA wal_checkpoint"):
                    system().unsynced = None
                return done
            return self._commit(partial(self._patiently, run))  # a transaction of its own
        finally:
            if not selects:
                system().real_changes()

    def __exit__(self, kind: Any, *rest: Any) -> Any:
        try:
            if kind is None and self.in_transaction and self.total_changes > self._before:
                self._check()
                try:
                    return self._commit(lambda: sqlite3.Connection.__exit__(self, kind, *rest))
                except BaseException:
                    if not self.dead and self.in_transaction:
                        self.rollback()
                    raise
            return sqlite3.Connection.__exit__(self, kind, *rest)
        finally:
            system().real_changes()

    def _commit(self, run: Callable[[], Any]) -> Any:
        crash, files = self._meet("commit", crashes=False), system()
        faults = files.faults
        faults.crashing += crash is not None
        try:
            world().pause(SYNC)
            if crash is None:
                return self._synced(run)
            before = snapshot(files.real) if files.unsynced is None else files.unsynced
            run()
            tear(files, before, world().dice)
            faults.counts[crash] += 1
            files.crash(CRASHES[crash])
        finally:
            faults.crashing -= crash is not None
        world().alive()
        raise AssertionError("a crash that nobody noticed")

    def _synced(self, run: Callable[[], Any]) -> Any:
        """A commit that no power failure interrupts."""
        files = system()
        before = snapshot(files.real) if self.lazy and files.unsynced is None else files.unsynced
        written = files.written_back()
        done = run()
        files.unsynced = before if self.lazy and files.written_back() == written else None
        return done

    def _meet(self, call: str, crashes: bool = True) -> str | None:
        """Meets the fault that is armed for this call. Returns a crash that the caller must carry out itself."""
        files = system()
        kind = files.faults.take(call)
        if kind is None:
            return None
        here = world()
        here.say(f"{call}: {kind}")
        if kind in CRASHES:
            if CRASHES[kind] == "power_loss" and not crashes:
                return kind
            files.faults.counts[kind] += 1
            files.crash(CRASHES[kind])
            here.alive()
        elif kind in SQL_CODES:
            files.faults.counts[kind] += 1
            raise sql_error(kind)
        elif kind == "slow":
            files.faults.counts[kind] += 1
            here.pause(3.0)
        elif kind == "hung":
            files.faults.counts[kind] += 1
            here.sleep(12.0 + 30.0 * here.dice.random())
        return None

    def _patiently(self, run: Callable[[], Any]) -> Any:
        """SQLite waits for others in real time, so here it does not wait at all, and is asked again."""
        ends: float | None = None
        while True:
            try:
                return run()
            except sqlite3.OperationalError as error:
                here = world()
                ends = here.now + BUSY if ends is None else ends
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or here.now >= ends:
                    raise
            here.sleep(0.01 + 0.01 * here.dice.random())
            self._check()

    def _check(self) -> None:
        world().alive()
        if self.dead:
            raise AssertionError("a connection of a dead process")

    def close(self) -> None:
        self._check()
        self.dead = True
        super().close()
        system().unsynced = None  # the last one to close it writes the log back
        system().real_changes()

    def end(self) -> None:
        """The process has died."""
        if not self.dead:
            self.dead = True
            self.rollback()
            sqlite3.Connection.close(self)
            system().unsynced = None  # the last one to close it writes the log back
            system().real_changes()


def connect(address: str, *, timeout: float, isolation_level: None, check_same_thread: bool, uri: bool) -> Connection:
    path = urlsplit(address)
    files = system()
    files.call("open", path.path)
    real = files.is_real(path.path)
    assert real is not None
    where = f"file:{quote(real)}?{path.query}"
    made = sqlite3.connect(where, timeout=0, isolation_level=None, check_same_thread=False, factory=Connection, uri=True)
    sqlite3.Connection.execute(made, "PRAGMA cache_size=-512")
    files.real_changes()
    task = world().task
    assert task is not None
    task.process.exits.append(made.end)
    return made


def keys_of(folder: Path) -> set[bytes]:
    """The keys of all rows. There are none while a damaged catalogue is replaced."""
    path = folder / "index.sqlite"
    if not path.exists():
        return set()
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database, suppress(sqlite3.OperationalError):
        return {key for (key,) in database.execute("SELECT key FROM objects")}
    return set()  # its tables were just being created


def snapshot(folder: Path) -> dict[str, bytes]:
    """The database and its log."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.endswith("-shm")}


def restore(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def tear(files: FileSystem, before: dict[str, bytes], dice: random.Random) -> None:
    """Chooses what is left of commits in a power failure. The process must not use its connections any more.

    Args:
        before: the database and its log before them.
    """
    after = snapshot(files.real)
    log = next((name for name in after if name.endswith("-wal")), None)
    chosen = before
    match dice.randrange(3):
        case 0 if log is not None and after[log] != before.get(log):
            chosen = {**before, log: _torn(before.get(log, b""), after[log], dice)}
            files.disk.lost["torn commit"] += 1
        case 1:
            chosen = after
            files.disk.lost["commit without answer"] += 1
        case _:
            files.disk.lost["lost commit"] += 1
    files.after_crash = chosen


def _torn(old: bytes, new: bytes, dice: random.Random) -> bytes:
    """A log of which some sectors were written. Its header is written, and synced, before it is begun again."""
    if len(new) < LOG_HEADER:
        return new
    left = bytearray(old.ljust(dice.randint(min(len(old), len(new)), len(new)), b"\0"))
    for at in range(0, min(len(left), len(new)), SECTOR):
        if dice.random() < 0.7:
            sector = new[at : at + SECTOR][: len(left) - at]
            left[at : at + len(sector)] = sector
    left[:LOG_HEADER] = new[:LOG_HEADER]
    return bytes(left)


_NAMES = {name: value for name, value in vars(sqlite3).items() if not name.startswith("__")}
SQLITE = StandIn("sqlite3", {**_NAMES, "connect": connect})
