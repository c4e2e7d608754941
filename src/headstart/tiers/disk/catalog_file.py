"""Catalogue file: the catalogue of a folder is made, opened, and made anew when it is damaged.

Beside it stands a file with the time up to which a user has deleted everything, because a damaged catalogue loses it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from headstart.tiers.disk import files
from headstart.tiers.disk.catalog import Catalog
from headstart.tiers.disk.lock import Lock
from headstart.tiers.disk.schema import Alone, create, damages, drop

log = logging.getLogger("headstart.disk")

CHECKED = 8 << 20
"""Bytes of a catalogue up to which all of it is read when a server opens it. Damage in a larger one is found on the way."""
ATTEMPTS = 3
"""Times that a damaged catalogue is opened. Another process may damage or replace it meanwhile."""
_INDEX = "index.sqlite"
_DELETED = "deleted"


class CatalogFile:
    """The file of the catalogue in a folder.

    Args:
        lock: of the folder.
        check: whether the whole catalogue is read, which shows damage at once. A small one always is.

    Attributes:
        path: of the file.
    """

    def __init__(self, folder: Path, lock: Lock, *, check: bool) -> None:
        self.path = folder / _INDEX
        self._folder = folder
        self._lock = lock
        self._check = check

    def open(self) -> Catalog:
        """Opens the catalogue. Makes it if there is none, and anew if it is damaged. Raises OSError, sqlite3.Error."""
        path, attempts = self.path, 0
        while True:
            attempts += 1
            self._create()
            try:
                self._lock.watch(path, files.identity(path))  # before it is opened: another process may replace it meanwhile
                return self._read(self._alone)
            except Exception as error:
                if attempts == ATTEMPTS:
                    raise
                if not path.exists() or _replaced(error):  # another process replaces it just now
                    continue
                if not damages(error):
                    raise
                log.warning("the catalogue is damaged: %s", error)
            with self._lock.renewed():
                if path.exists() and self._damaged():
                    log.warning("it will be rebuilt from the objects, without pins")
                    drop(path)

    @contextlib.contextmanager
    def _alone(self, needed: Callable[[], bool]) -> Iterator[None]:
        with self._lock.renewed(needed):
            self._lock.same(self.path)
            yield

    def _create(self) -> None:
        path = self.path
        # A catalogue gets its name when it has its tables. SQLite deletes the log of an empty database at its first read, and
        # finds it by its name: a process that had opened an empty one just before it was replaced would delete the log of the
        # new one. The file is created here, because SQLite would let other users read it.
        if not _filled(path):
            with self._lock.renewed():
                if not _filled(path):
                    new = path.with_name(f"{path.name}.new")
                    drop(new)
                    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
                    try:
                        create(new)
                    except BaseException:
                        with contextlib.suppress(OSError):
                            drop(new)  # the disk may be full
                        raise
                    drop(path)  # the log of an earlier one may be left, and would be taken for its own
                    files.sync(self._folder)
                    os.replace(new, path)
                    files.sync(self._folder)

    def _read(self, alone: Alone) -> Catalog:
        path = self.path
        catalog = Catalog(path, alone, creates=False, same=lambda: self._lock.same(path))
        try:
            if self._check or path.stat().st_size <= CHECKED:
                catalog.read()
            self._recall_deleted(catalog)
        except BaseException:
            catalog.close()
            raise
        return catalog

    def _damaged(self) -> bool:
        """Whether it is still damaged, under the lock: another process may have replaced it.

        One that is still of an earlier version is: its conversion has failed.
        """

        def converts(needed: Callable[[], bool]) -> AbstractContextManager[None]:
            if needed():
                raise sqlite3.DatabaseError("of an earlier version")
            return contextlib.nullcontext()

        try:
            self._read(converts).close()
        except Exception as error:
            return damages(error)
        return False

    def drop(self) -> None:
        """Deletes it. Call this under the lock. Raises OSError."""
        drop(self.path)

    def note_deleted(self, before: float) -> None:
        """Writes down beside the catalogue that a user has deleted everything up to this time."""
        path = self._folder / f"{_DELETED}.new"  # the objects may fill their part of the budget
        files.write(path, (memoryview(repr(before).encode()),), before)
        os.replace(path, self._folder / _DELETED)
        files.sync(self._folder)

    def _recall_deleted(self, catalog: Catalog) -> None:
        """Gives a new catalogue what the lost one knew: servers that were not told yet must still forget what was deleted."""
        if catalog.ages.wiped()[1]:
            return
        try:
            before = float(files.read(self._folder / _DELETED))
        except FileNotFoundError:
            return
        except ValueError:
            log.warning("%s has no time in it", _DELETED)
            return
        catalog.ages.recall(before)


def _replaced(error: Exception) -> bool:
    """Whether an error may mean that a file was deleted or replaced just when it was opened."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOENT, errno.ESTALE)
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN


def _filled(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
