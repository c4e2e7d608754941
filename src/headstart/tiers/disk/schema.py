"""Schema: the catalogue's tables, how older ones become them, and which errors say that a catalogue is damaged."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headstart.prefix_cache.quota import owner_of
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST

VERSION = 4
_SOILED = """
CREATE TABLE IF NOT EXISTS soiled (            -- a row, if something was erased and may still lie about in the files
    id INTEGER PRIMARY KEY CHECK (id = 1)
);
"""
_TABLES = f"""
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
    kind TEXT NOT NULL DEFAULT 'rows',         -- or 'state'
    sort INTEGER NOT NULL DEFAULT 0,           -- prefix_cache/reuse_model: what is known of the latest request
    weight REAL NOT NULL DEFAULT {UNKNOWN_REQUEST.weight},
    written REAL NOT NULL DEFAULT 0,           -- when its tokens were first kept
    owner BLOB NOT NULL DEFAULT x''            -- whose it is; empty if nobody knows
);
CREATE INDEX IF NOT EXISTS by_owner ON objects (owner, written);
CREATE INDEX IF NOT EXISTS by_age ON objects (written);
CREATE INDEX IF NOT EXISTS by_parent ON objects (parent);
CREATE INDEX IF NOT EXISTS by_fingerprint ON objects (fingerprint, number);
CREATE TABLE IF NOT EXISTS gone (              -- objects, the latest
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    key BLOB NOT NULL UNIQUE,
    used REAL NOT NULL,
    heat REAL NOT NULL,
    uses INTEGER NOT NULL,
    sort INTEGER NOT NULL,
    weight REAL NOT NULL,
    written REAL NOT NULL DEFAULT 0,
    owner BLOB NOT NULL DEFAULT x''
);
CREATE TABLE IF NOT EXISTS notes (             -- what is to be known again beside a block, and is gone with it
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    fingerprint BLOB NOT NULL,
    key BLOB NOT NULL,
    block BLOB NOT NULL,
    value BLOB NOT NULL,
    written REAL NOT NULL DEFAULT 0,
    UNIQUE (fingerprint, key)
);
CREATE INDEX IF NOT EXISTS by_block ON notes (block);
CREATE TABLE IF NOT EXISTS models (            -- what fingerprints are of, for people
    fingerprint BLOB PRIMARY KEY,
    name TEXT NOT NULL,
    file TEXT NOT NULL,
    mark TEXT NOT NULL                         -- by which it is seen that the file is still the same
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS terms (             -- how long what is whose may be kept
    owner BLOB PRIMARY KEY,
    seconds REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS erased (            -- by somebody's wish: running servers forget it too
    id INTEGER PRIMARY KEY CHECK (id = 1),
    before REAL NOT NULL,                      -- all that was written by then
    times INTEGER NOT NULL                     -- how often that, or a chain, was
);
{_SOILED}
CREATE TABLE IF NOT EXISTS spells (            -- prefix_cache/reuse_model: its counts, where there are any
    row INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    octave INTEGER NOT NULL,
    count REAL NOT NULL,
    PRIMARY KEY (row, kind, octave)
) WITHOUT ROWID;
"""


def connect(path: Path) -> sqlite3.Connection:
    """A connection to a catalogue, which is made, or altered, as it has to be.

    Raises:
        sqlite3.Error: it cannot be opened, is damaged, or of a later version.
    """
    database = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    try:
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise sqlite3.NotSupportedError(f"the catalogue is of version {version}; this headstart reads {VERSION}")
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("PRAGMA secure_delete=ON")  # what is deleted is overwritten: it says what people typed
        database.execute("PRAGMA temp_store=MEMORY")  # and no copy of it comes to lie elsewhere
        if version < VERSION:
            _migrate(database)
        database.executescript(_TABLES)
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def change(database: sqlite3.Connection) -> Iterator[None]:
    """A transaction that nobody else's comes between."""
    with database:
        database.execute("BEGIN IMMEDIATE")
        yield


def _migrate(database: sqlite3.Connection) -> None:
    with change(database):
        columns = _columns(database, "objects")
        if "number" in columns and "kind" not in columns:  # it is of version 1, and no other process was faster
            database.execute("ALTER TABLE objects ADD COLUMN kind TEXT NOT NULL DEFAULT 'rows'")
        if "number" in columns and "sort" not in columns:  # of version 2 or before
            # Its column `reply` and its tables `ghosts` and `learned` stay: an older process may have it open.
            database.execute("ALTER TABLE objects ADD COLUMN sort INTEGER NOT NULL DEFAULT 0")
            database.execute(f"ALTER TABLE objects ADD COLUMN weight REAL NOT NULL DEFAULT {UNKNOWN_REQUEST.weight}")
        for table, names in (("objects", ("written", "owner")), ("gone", ("written", "owner")), ("notes", ("written",))):
            known = _columns(database, table)
            for name in set(names) - known if "number" in known else ():  # of version 3 or before
                kind = "REAL NOT NULL DEFAULT 0" if name == "written" else "BLOB NOT NULL DEFAULT x''"
                database.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
        if "number" in columns and "written" not in columns:
            database.execute("UPDATE objects SET written = created")
            found = _owners(database.execute("SELECT key, parent, start FROM objects"))
            database.executemany("UPDATE objects SET owner = ? WHERE key = ?", [(who, key) for key, who in found.items()])
        if columns:  # older versions did not overwrite what they deleted
            database.execute(_SOILED)
            soil(database)
        database.execute(f"PRAGMA user_version={VERSION}")
    if columns:
        with suppress(sqlite3.OperationalError):  # others have it open
            scrub(database)


def soil(database: sqlite3.Connection) -> None:
    """Notes, in a transaction that erases something, that it may still lie about in the files."""
    database.execute("INSERT OR IGNORE INTO soiled (id) VALUES (1)")


def clean(database: sqlite3.Connection) -> bool:
    """Whether nothing lies about there."""
    return database.execute("SELECT 1 FROM soiled").fetchone() is None


def scrub(database: sqlite3.Connection) -> None:
    """Leaves nothing of what was erased in the files. SQLite overwrites it (`connect`), but not what lies about in pages whose
    rows it has moved. If others read them for too long it is not `clean` afterwards.
    """
    database.execute("VACUUM")
    busy, *_ = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if not busy:
        database.execute("DELETE FROM soiled")


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {column for _, column, *_ in database.execute(f"PRAGMA table_info({table})")}


def _owners(objects: Iterable[tuple[bytes, bytes, int]]) -> dict[bytes, bytes]:
    """Whose each object is, of which this says its key, what it hangs on, and where it starts."""
    above = {key: (parent, start) for key, parent, start in objects}
    owner: dict[bytes, bytes] = {}
    for key in above:
        path, at = list[bytes](), key
        while at in above and at not in owner:
            owner[at] = b""  # a damaged catalogue may lead in circles
            path.append(at)
            at = above[at][0]
        first = at not in above and path and above[path[-1]][1] == 0  # it hangs on a root, which says whose it is
        owner.update(dict.fromkeys(path, owner_of(at) if first else owner.get(at, b"")))
    return owner


def drop(path: Path) -> None:
    """Deletes a catalogue. Raises OSError."""
    for suffix in ("-wal", "-shm", ""):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def damages(error: Exception) -> bool:
    """Whether an error of the catalogue says that it holds garbage, rather than that it cannot be used just now."""
    if isinstance(error, sqlite3.OperationalError):
        # Tables other than ours; or, without a code, values of a type that ours do not have.
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF == sqlite3.SQLITE_ERROR
    return isinstance(error, sqlite3.DatabaseError | ValueError | TypeError) and not isinstance(
        error, sqlite3.NotSupportedError
    )
