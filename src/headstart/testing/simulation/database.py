"""Database: a stand-in for `sqlite3`. The catalogue is a real database in a real folder, which a power failure rolls back.

SQLite promises with `journal_mode=WAL` and `synchronous=FULL`: each transaction whose commit has returned stays. A transaction
that a power failure interrupts is there as a whole, or not at all, and the end of the log may be torn. So a failure between two
statements leaves the files as they are, because SQLite has synced them. A failure during a commit leaves one of these states,
as the dice say: no byte of the commit, a part of its bytes with holes, or all of it.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from headstart.testing.simulation.faults import SQL_CODES, sql_error
from headstart.testing.simulation.filesystem import system
from headstart.testing.simulation.kernel import world
from headstart.testing.simulation.threads import StandIn

BUSY = 5.0
"""Seconds for which a connection waits for another one's transaction."""
SECONDS = 1e-4
"""Most virtual seconds of a statement."""
SYNC = 5e-3
"""Most virtual seconds of a commit."""

_execute, _executemany = sqlite3.Connection.execute, sqlite3.Connection.executemany


class Connection(sqlite3.Connection):
    """A connection whose statements take virtual time and meet faults."""

    dead = False

    def execute(self, sql: str, *values: Any) -> Any:
        return self._statement(sql, partial(_execute, self, sql, *values))

    def executemany(self, sql: str, values: Any) -> Any:
        return self._statement(sql, partial(_executemany, self, sql, list(values)))

    def _statement(self, sql: str, run: Callable[[], sqlite3.Cursor]) -> Any:
        self._check()
        selects = sql.startswith("SELECT")
        reads = selects or sql.startswith("PRAGMA")
        here = world()
        if here.trace is not None:
            here.say(f"sql {sql[:100]!r}")
        try:
            if reads or self.in_transaction or sql.startswith("BEGIN"):
                self._meet("select" if reads else "change")
                here.pause(SECONDS)
                return self._patiently(run)
            return self._commit(partial(self._patiently, run))  # a transaction of its own
        finally:
            if not selects:
                system().real_changes()

    def __exit__(self, kind: Any, *rest: Any) -> Any:
        try:
            if kind is None and self.in_transaction:
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
        crash, faults = self._meet("commit", crashes=False), system().faults
        faults.crashing += crash is not None
        try:
            world().pause(SYNC)
            if crash is None:
                return run()
            before = snapshot(system().real)
            run()
            tear(system().real, before, world().dice)
            faults.counts[crash] += 1
            system().crash(crash)
        finally:
            faults.crashing -= crash is not None
        world().alive()
        raise AssertionError("a crash that nobody noticed")

    def _meet(self, call: str, crashes: bool = True) -> str | None:
        """Meets the fault that is armed for this call. Returns a crash that the caller must carry out itself."""
        files = system()
        kind = files.faults.take(call)
        if kind is None:
            return None
        here = world()
        here.say(f"{call}: {kind}")
        if kind in ("power_loss", "kill"):
            if kind == "power_loss" and not crashes:
                return kind
            files.faults.counts[kind] += 1
            files.crash(kind)
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
        system().real_changes()

    def end(self) -> None:
        """The process has died."""
        if not self.dead:
            self.dead = True
            self.rollback()
            sqlite3.Connection.close(self)
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


def snapshot(folder: Path) -> dict[str, bytes]:
    """The database and its log."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.endswith("-shm")}


def restore(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def tear(folder: Path, before: dict[str, bytes], dice: random.Random) -> None:
    """Chooses what is left of a commit in a power failure. The process must not use its connections any more."""
    after = snapshot(folder)
    log = next((name for name in after if name.endswith("-wal")), None)
    old, new = before.get(log or "", b""), after.get(log or "", b"")
    chosen = before
    match dice.randrange(3):
        case 0 if log is not None and len(new) > len(old) and new.startswith(old):
            left = bytearray(new[: dice.randrange(len(old), len(new))])
            for at in range(len(old) // 512 * 512, len(left), 512):
                if at >= len(old) and dice.random() < 0.3:
                    left[at : at + 512] = bytes(len(left[at : at + 512]))
            chosen = {**before, log: bytes(left)}
            system().disk.lost["torn commit"] += 1
        case 1:
            chosen = after
            system().disk.lost["commit without answer"] += 1
        case _:
            system().disk.lost["lost commit"] += 1
    system().after_crash = chosen


_NAMES = {name: value for name, value in vars(sqlite3).items() if not name.startswith("__")}
SQLITE = StandIn("sqlite3", {**_NAMES, "connect": connect})
