"""Schema: the tables of the catalogue, their conversion from older versions, and the errors of a damaged catalogue."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path

from headstart.prefix_cache.quota import owner_of
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST

VERSION = 6
CHECKPOINT = 250
"""Pages of the log after which a commit writes them into the database. With 1,000, as is usual, some commits take 6 ms."""
_TABLES = {
    "objects": f"""(
        number INTEGER PRIMARY KEY AUTOINCREMENT,  -- grows: others find what is new behind the last number they have seen
        key BLOB NOT NULL UNIQUE,
        parent BLOB NOT NULL,
        fingerprint BLOB NOT NULL,
        start INTEGER NOT NULL,
        tokens BLOB NOT NULL,
        canonical INTEGER NOT NULL,
        seconds REAL NOT NULL,
        allocated INTEGER NOT NULL,                -- bytes on disk
        used REAL NOT NULL,                        -- last time
        pinned INTEGER NOT NULL DEFAULT 0,
        uses INTEGER NOT NULL DEFAULT 1,
        kind TEXT NOT NULL DEFAULT 'rows',         -- or 'state'
        bucket INTEGER NOT NULL DEFAULT 0,         -- with weight: the traits of the latest request (prefix_cache/reuse_model)
        weight REAL NOT NULL DEFAULT {UNKNOWN_REQUEST.weight},
        written REAL NOT NULL DEFAULT 0,           -- when its tokens were stored first
        owner BLOB NOT NULL DEFAULT x'',           -- empty if unknown
        rank REAL NOT NULL DEFAULT 0,              -- lowest goes first; as it was when it was last worked out (ranks.py)
        children INTEGER NOT NULL DEFAULT 0        -- objects whose parent it is
    )""",
    "totals": """(                              -- one row, which triggers keep
        id INTEGER PRIMARY KEY CHECK (id = 1),
        bytes INTEGER NOT NULL DEFAULT 0,          -- of all objects
        objects INTEGER NOT NULL DEFAULT 0,
        pins INTEGER NOT NULL DEFAULT 0,           -- grows with each change of what is pinned
        hand INTEGER NOT NULL DEFAULT 0,           -- the number up to which ranks were renewed last
        erased INTEGER NOT NULL DEFAULT 0          -- grows with each deletion that leaves no ghost
    )""",
    "owned": """(                               -- totals of the owners of objects, which triggers keep
        owner BLOB PRIMARY KEY,
        bytes INTEGER NOT NULL,
        objects INTEGER NOT NULL,
        pinned INTEGER NOT NULL                    -- bytes
    ) WITHOUT ROWID""",
    "made": """(                                -- totals of the fingerprints of objects, which triggers keep
        fingerprint BLOB PRIMARY KEY,
        objects INTEGER NOT NULL,
        states INTEGER NOT NULL                    -- of these, checkpoints
    ) WITHOUT ROWID""",
    "ghosts": f"""(                                -- the latest objects that had to make room
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        key BLOB NOT NULL UNIQUE,
        used REAL NOT NULL,
        uses INTEGER NOT NULL,
        bucket INTEGER NOT NULL DEFAULT 0,
        weight REAL NOT NULL DEFAULT {UNKNOWN_REQUEST.weight},
        written REAL NOT NULL DEFAULT 0,
        owner BLOB NOT NULL DEFAULT x''
    )""",
    "notes": """(                                  -- small values that are kept beside a block, and deleted with it
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        fingerprint BLOB NOT NULL,
        key BLOB NOT NULL,
        block BLOB NOT NULL,
        value BLOB NOT NULL,
        written REAL NOT NULL DEFAULT 0,
        UNIQUE (fingerprint, key)
    )""",
    "intervals": """(                              -- the counts of prefix_cache/reuse_model that are not 0
        row INTEGER NOT NULL,
        kind INTEGER NOT NULL,
        octave INTEGER NOT NULL,
        count REAL NOT NULL,
        PRIMARY KEY (row, kind, octave)
    ) WITHOUT ROWID""",
    "models": """(                                 -- what fingerprints belong to, for people
        fingerprint BLOB PRIMARY KEY,
        name TEXT NOT NULL,
        file TEXT NOT NULL,
        mark TEXT NOT NULL                         -- changes with the file
    ) WITHOUT ROWID""",
    "terms": """(                                  -- how long the objects of an owner may be kept
        owner BLOB PRIMARY KEY,
        seconds REAL NOT NULL
    ) WITHOUT ROWID""",
    "given": """(                                  -- when the owner of a term sent a request that was noted last
        owner BLOB PRIMARY KEY,
        at REAL NOT NULL
    ) WITHOUT ROWID""",
    "erased": """(                                 -- deleted on request: running servers forget it too
        id INTEGER PRIMARY KEY CHECK (id = 1),
        before REAL NOT NULL,                      -- everything that was written up to this time
        times INTEGER NOT NULL                     -- number of such requests, those for one chain included
    )""",
    "tombstones": """(                             -- whose entries were deleted: running servers drop what only memory has
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        owner BLOB NOT NULL,                       -- empty for anybody
        written REAL NOT NULL
    )""",
    "soiled": """(                                 -- a row, if parts of deleted text may still be in the files
        id INTEGER PRIMARY KEY CHECK (id = 1)
    )""",
}
_INDEXES = {
    "by_owner": "objects (owner, written)",
    "by_age": "objects (written)",
    "by_parent": "objects (parent)",
    "by_fingerprint": "objects (fingerprint, number)",
    "by_block": "notes (block)",
    "by_pin": "objects (key) WHERE pinned",
    "by_first": "objects (fingerprint, number) WHERE start = 0 AND kind = 'rows'",
    "by_rank": "objects (rank, used, start DESC, key) WHERE children = 0 AND pinned = 0",
    "by_owners_rank": "objects (owner, rank, used, start DESC, key) WHERE children = 0 AND pinned = 0",
    "by_bytes": "owned (bytes)",
}
_ADD = """
    UPDATE totals SET bytes = bytes + NEW.allocated, objects = objects + 1, pins = pins + NEW.pinned;
    INSERT INTO owned (owner, bytes, objects, pinned)
        VALUES (NEW.owner, NEW.allocated, 1, NEW.allocated * (NEW.pinned != 0))
        ON CONFLICT (owner) DO UPDATE
        SET bytes = bytes + excluded.bytes, objects = objects + 1, pinned = pinned + excluded.pinned;
    INSERT INTO made (fingerprint, objects, states) VALUES (NEW.fingerprint, 1, NEW.kind = 'state')
        ON CONFLICT (fingerprint) DO UPDATE SET objects = objects + 1, states = states + excluded.states;
"""
_TAKE = """
    UPDATE totals SET bytes = bytes - OLD.allocated, objects = objects - 1, pins = pins + OLD.pinned;
    UPDATE owned SET bytes = bytes - OLD.allocated, objects = objects - 1, pinned = pinned - OLD.allocated * (OLD.pinned != 0)
        WHERE owner = OLD.owner;
    DELETE FROM owned WHERE owner = OLD.owner AND objects <= 0;
    UPDATE made SET objects = objects - 1, states = states - (OLD.kind = 'state') WHERE fingerprint = OLD.fingerprint;
    DELETE FROM made WHERE fingerprint = OLD.fingerprint AND objects <= 0;
"""
_TRIGGERS = {
    "object_came": f"""AFTER INSERT ON objects BEGIN
    {_ADD}
    UPDATE objects SET children = children + 1 WHERE key = NEW.parent;
    UPDATE objects SET children = (SELECT COUNT(*) FROM objects WHERE parent = NEW.key)
        WHERE key = NEW.key AND EXISTS (SELECT 1 FROM objects WHERE parent = NEW.key);
    END""",
    "object_went": f"""AFTER DELETE ON objects BEGIN
    {_TAKE}
    UPDATE objects SET children = children - 1 WHERE key = OLD.parent;
    END""",
    "object_changed": f"AFTER UPDATE OF allocated, pinned, owner ON objects BEGIN {_TAKE} {_ADD} END",
}
_COUNTED = (
    ("totals", "id, bytes, objects", "SELECT 1, COALESCE(SUM(allocated), 0), COUNT(*) FROM objects"),
    (
        "owned",
        "owner, bytes, objects, pinned",
        "SELECT owner, SUM(allocated), COUNT(*), SUM(allocated * (pinned != 0)) FROM objects GROUP BY owner",
    ),
    (
        "made",
        "fingerprint, objects, states",
        "SELECT fingerprint, COUNT(*), SUM(kind = 'state') FROM objects GROUP BY fingerprint",
    ),
)
"""What the tables of totals must say: a table, its columns, and a query."""
_LRU = "0.05 * MAX(seconds, 1e-9) / MAX(allocated, 1) / MAX(1.0, strftime('%s', 'now') - used)"
"""The first ranks of rows from older versions: nearly those without any data (prefix_cache/reuse_model)."""
_REBUILT = {"objects": ("objects",), "ghosts": ("gone", "ghosts"), "notes": ("notes",), "intervals": ("spells",)}
"""Tables that differ in older versions: what they were called there, the later name first."""
_COLUMNS = {"bucket": "sort", "written": "created"}
"""Columns by what they were called in older versions."""


Alone = Callable[[Callable[[], bool]], AbstractContextManager[None]]
"""Excludes other processes, and those of older versions for good if that is needed: see `lock.Lock.renewed`."""


def connect(
    path: Path, alone: Alone = lambda _: nullcontext(), *, creates: bool = True, same: Callable[[], None] = lambda: None
) -> sqlite3.Connection:
    """A connection to a catalogue. Its tables are created if there are none, and rebuilt if they are of an older version.

    SQLite finds the log by its name, when it is first needed. If another process replaces the catalogue between the opening of
    the database and that moment, the log is that of the new one, and what is written ruins it. So nothing is written before
    `same` has been called after a read, and a file without tables is written in `alone` only.

    Args:
        alone: excludes other processes that create, replace or rebuild it, and calls `same`. If its argument returns true, it
            excludes processes of older versions for good: they would take the rebuilt tables for damage.
        creates: whether the file is created if there is none.
        same: raises OSError if the file at `path` is no longer the one that was to be opened.

    Raises:
        sqlite3.Error: it cannot be opened, is damaged, or of a later version.
        OSError: `alone` or `same` has failed.
    """
    uri = f"{path.absolute().as_uri()}?mode={'rwc' if creates else 'rw'}"
    database = sqlite3.connect(uri, timeout=5.0, isolation_level=None, check_same_thread=False, uri=True)
    try:
        version = known_version(database)
        same()
        if version < VERSION:
            with alone(lambda: 0 < _version(database) < VERSION):
                _prepare(database)
                _renew(database)
        else:
            _prepare(database)
        _create(database)
    except BaseException:
        database.close()
        raise
    return database


def create(path: Path) -> None:
    """Creates the tables in an empty file. Nothing is left beside it. Raises sqlite3.Error."""
    with closing(connect(path, creates=False)) as database:
        # Closing would do this too, and hide that it has failed.
        ((busy, *_),) = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if busy:
            raise sqlite3.OperationalError("a new catalogue is in use")


def _prepare(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT}")
    database.execute("PRAGMA secure_delete=ON")  # deleted rows are overwritten: they contain what people typed
    database.execute("PRAGMA temp_store=MEMORY")  # and no copy of them is written to another file


def _renew(database: sqlite3.Connection) -> None:
    """Creates the tables, or rebuilds those of an older version, unless another process has just done so."""
    version = _version(database)
    if 0 < version < VERSION:
        _rebuild(database)
    elif not version:
        with change(database):
            _create(database)
            database.execute(f"PRAGMA user_version={VERSION}")


def known_version(database: sqlite3.Connection) -> int:
    """The version of a catalogue; 0 if it has no tables. Raises sqlite3.NotSupportedError if it is a later one."""
    if (version := _version(database)) > VERSION:
        raise sqlite3.NotSupportedError(f"the catalogue is of version {version}; this headstart reads {VERSION}")
    return version


def _version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def _create(database: sqlite3.Connection) -> None:
    """Creates the tables and indexes that are missing."""
    for name, definition in _TABLES.items():
        database.execute(f"CREATE TABLE IF NOT EXISTS {name} {definition}")
    for name, columns in _INDEXES.items():
        database.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {columns}")
    for name, definition in _TRIGGERS.items():
        database.execute(f"CREATE TRIGGER IF NOT EXISTS {name} {definition}")
    if database.execute("SELECT 1 FROM totals").fetchone() is None:
        database.execute("INSERT OR IGNORE INTO totals (id) VALUES (1)")
    _first_tombstone(database)


def _first_tombstone(database: sqlite3.Connection) -> None:
    """A catalogue that takes the place of a lost one does not know what was deleted: anybody's entries may have been.

    Its tombstones have other numbers than the lost ones: a server that has seen those notices it.
    """
    none = "NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'tombstones')"
    if database.execute(f"SELECT 1 WHERE {none}").fetchone() is not None:
        now = time.time()
        query = f"INSERT INTO tombstones (number, owner, written) SELECT ?, x'', ? WHERE {none}"
        database.execute(query, (int(now * 1000), now))


@contextmanager
def change(database: sqlite3.Connection) -> Iterator[None]:
    """A transaction that no other connection can interrupt."""
    with database:
        database.execute("BEGIN IMMEDIATE")
        yield


def _rebuild(database: sqlite3.Connection) -> None:
    """Copies all rows of an older version into the present tables. `ALTER TABLE … DROP COLUMN` would be shorter, but some
    systems have a SQLite that is too old for it.
    """
    with change(database):
        if _version(database) == VERSION:  # another process was faster
            return
        there = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        before = {name: next((was for was in names if was in there), "") for name, names in _REBUILT.items()}
        for was in filter(None, before.values()):
            database.execute(f"ALTER TABLE {was} RENAME TO old_{was}")
        for index in _INDEXES:
            database.execute(f"DROP INDEX IF EXISTS {index}")
        for name in ("ghosts", "learned"):  # left over from versions 1 and 2
            database.execute(f"DROP TABLE IF EXISTS {name}")
        _create(database)
        for name in _TRIGGERS:  # counting all rows afterwards is faster
            database.execute(f"DROP TRIGGER {name}")
        for name, was in before.items():
            if was:
                _move(database, f"old_{was}", name)
        recount(database)
        _create(database)
        database.execute(f"UPDATE objects SET rank = {_LRU}")
        soil(database)  # versions before 4 did not overwrite what they deleted
        database.execute(f"PRAGMA user_version={VERSION}")
    with suppress(sqlite3.OperationalError):  # others have it open
        scrub(database)


def _move(database: sqlite3.Connection, old: str, new: str) -> None:
    """Moves the rows of a table. Missing columns keep their defaults, except the owners of objects, which are computed."""
    known = _columns(database, old)
    pairs = [(name, was) for name in _columns(database, new) if (was := name if name in known else _COLUMNS.get(name)) in known]
    names, values = (", ".join(column) for column in zip(*pairs, strict=True))
    database.execute(f"INSERT INTO {new} ({names}) SELECT {values} FROM {old}")
    database.execute(f"DROP TABLE {old}")
    if new == "objects" and "written" not in known:  # versions 1 to 3
        found = _owners(database.execute("SELECT key, parent, start FROM objects"))
        database.executemany("UPDATE objects SET owner = ? WHERE key = ?", [(owner, key) for key, owner in found.items()])


def recount(database: sqlite3.Connection) -> bool:
    """Counts all objects, and corrects the totals and the numbers of children in a transaction. Returns whether all were right.

    It reads the whole table.
    """
    right = True
    for table, columns, query in _COUNTED:
        now = database.execute(query).fetchall()
        if sorted(now) != sorted(database.execute(f"SELECT {columns} FROM {table}").fetchall()):
            right = False
            places = ", ".join("?" * len(columns.split(",")))
            if table != "totals":
                database.execute(f"DELETE FROM {table}")
                database.executemany(f"INSERT INTO {table} ({columns}) VALUES ({places})", now)
            else:
                database.executemany(f"UPDATE totals SET ({columns}) = ({places})", now)
    counted = "(SELECT COUNT(*) FROM objects AS child WHERE child.parent = objects.key)"
    wrong = database.execute(f"UPDATE objects SET children = {counted} WHERE children != {counted}").rowcount
    return right and not wrong


def soil(database: sqlite3.Connection) -> None:
    """Records, in a transaction that deletes rows, that parts of them may still be in the files."""
    database.execute("INSERT OR IGNORE INTO soiled (id) VALUES (1)")


def clean(database: sqlite3.Connection) -> bool:
    """Whether no deleted text is left in the files."""
    return database.execute("SELECT 1 FROM soiled").fetchone() is None


def scrub(database: sqlite3.Connection) -> None:
    """Removes deleted text from the files. SQLite overwrites deleted rows (see `connect`), but not old copies of rows that it
    has moved between pages. If other processes read the files for too long, the catalogue is not `clean` afterwards.
    """
    database.execute("VACUUM")
    busy, *_ = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if not busy:
        database.execute("DELETE FROM soiled")


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {column for _, column, *_ in database.execute(f"PRAGMA table_info({table})")}


def _owners(objects: Iterable[tuple[bytes, bytes, int]]) -> dict[bytes, bytes]:
    """The owner of each object. `objects`: keys, parents and starts."""
    above = {key: (parent, start) for key, parent, start in objects}
    owner: dict[bytes, bytes] = {}
    for key in above:
        path, at = list[bytes](), key
        while at in above and at not in owner:
            owner[at] = b""  # a damaged catalogue may lead in circles
            path.append(at)
            at = above[at][0]
        first = at not in above and path and above[path[-1]][1] == 0  # its parent is a root, which names the owner
        owner.update(dict.fromkeys(path, owner_of(at) if first else owner.get(at, b"")))
    return owner


def drop(path: Path) -> None:
    """Deletes a catalogue. Raises OSError."""
    # The database first: without it, nobody takes the log for its own. If only the log could be deleted, another process would
    # go on with it, and nobody else could open the database.
    path.unlink(missing_ok=True)
    with ExitStack() as each:
        for suffix in ("-wal", "-shm", "-journal"):
            each.callback(Path(f"{path}{suffix}").unlink, missing_ok=True)


def damages(error: Exception) -> bool:
    """Whether an error means that the catalogue is damaged, and not only unusable at the moment."""
    if isinstance(error, sqlite3.OperationalError):
        # Other tables than ours, or (without a code) values of another type.
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF == sqlite3.SQLITE_ERROR
    return isinstance(error, sqlite3.DatabaseError | ValueError | TypeError) and not isinstance(
        error, sqlite3.NotSupportedError
    )
