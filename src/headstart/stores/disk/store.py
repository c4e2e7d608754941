"""Disk: the tier itself. Objects are written once, whole, and checked each time they are read.

    write   temporary file ─▶ fsync ─▶ rename ─▶ fsync of the folder ─▶ row in the catalogue
    delete  row in the catalogue ─▶ unlink

So a crash leaves a temporary file, or an object without a row; never a row whose object is not complete. `reconcile` finds
what crashes left. One process writes at a time (a lock on the folder); reading needs no lock.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.stores.base import Bytes, Store
from headstart.stores.disk import format
from headstart.stores.disk.catalog import Catalog, Row
from headstart.stores.disk.format import FormatError, Header, Label

try:
    import fcntl
except ImportError:  # pragma: no cover  (Windows: one process a folder)
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("headstart.disk")

RESERVE = 32 << 20
"""Bytes of the budget that are kept for the catalogue."""
HALF_LIFE = 6 * 3600.0
"""Seconds in which a use halves in weight."""
KEPT = 4
"""Bad objects that are kept to be looked at."""
LOCK_WAIT = 10.0
"""Seconds to wait for another process's write."""
_SUFFIX = ".rows"
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class _File:
    """An object that is about to be written."""

    label: Label
    head: bytes
    payload: Bytes

    @property
    def allocated(self) -> int:
        return -(-(len(self.head) + len(self.payload)) // _BLOCK) * _BLOCK


class Disk(Store):
    """Objects under `folder`, within `budget` bytes together with everything else there.

    `read_into` may be called from any thread; everything else from one thread at a time.

    Args:
        budget: bytes; at most half of what is free (and already ours) when it is opened.

    Raises:
        OSError: the folder cannot be made or read.
        sqlite3.Error: the catalogue cannot be opened (a damaged one is put aside and made anew).
    """

    name = "disk"

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder = folder
        self.objects = folder / "objects"
        self._temporary = folder / "tmp"
        self._quarantine = folder / "quarantine"
        for path in (folder, self.objects, self._temporary, self._quarantine):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._serial = itertools.count()
        self._locked = threading.Lock()
        self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            self.catalog = self._open_catalog(folder / "index.sqlite")
        except BaseException:
            os.close(self._lock)
            raise
        free = shutil.disk_usage(folder).free
        self._budget = min(budget, (free + self.catalog.used()) // 2)

    def _open_catalog(self, path: Path) -> Catalog:
        try:
            catalog = Catalog(path, HALF_LIFE)
        except sqlite3.NotSupportedError:
            raise
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            log.warning("the catalogue is damaged and will be made anew from the objects: %s", error)
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{path}{suffix}", f"{path}{suffix}.damaged")
            catalog = Catalog(path, HALF_LIFE)
        os.chmod(path, 0o600)
        return catalog

    def close(self) -> None:
        self.catalog.close()
        os.close(self._lock)

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def used(self) -> int:
        return self.catalog.used() + RESERVE

    def path(self, key: bytes) -> Path:
        return self.objects / f"{key.hex()}{_SUFFIX}"

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, batch: Sequence[tuple[Label, Bytes]], spare: Collection[bytes] = ()) -> tuple[list[Label], list[bytes]]:
        """Stores objects, evicting first; returns the labels that are stored, and the keys that had to go.

        Fewer are stored than given if the budget has no room for them besides what is pinned or in `spare`.

        Raises:
            OSError, sqlite3.Error: none of the batch is stored.
        """
        files = [_File(label, format.encode(label, payload), payload) for label, payload in batch]
        spare = {*spare, *(label.key for label, _ in batch), *(label.parent for label, _ in batch)}
        with self.writing():
            files, gone = self._make_room(files, spare)
            temporary: list[Path] = []
            try:
                temporary += (self._write_temporary(file) for file in files)
                for path, file in zip(temporary, files, strict=True):
                    os.replace(path, self.path(file.label.key))
                _sync_folder(self.objects)
            except BaseException:
                for path in temporary:
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)
                raise
            stored = [file.label for file in files]
            self.catalog.add((label, _allocated(self.path(label.key))) for label in stored)
        return stored, gone

    def _make_room(self, files: list[_File], spare: Collection[bytes]) -> tuple[list[_File], list[bytes]]:
        """Evicts for `files`; those that fit then, and the keys that went."""
        need, room = sum(file.allocated for file in files), self._budget - self.used
        gone: list[bytes] = []
        if need > room:
            gone = [row.label.key for row in self.catalog.victims(spare, need - room)]
            self._remove(gone)
            room = self._budget - self.used
        fitting = 0
        for file in files:
            room -= file.allocated
            if room < 0:
                break
            fitting += 1
        return files[:fitting], gone

    def _write_temporary(self, whole: _File) -> Path:
        path = self._temporary / f"{os.getpid()}-{next(self._serial)}{_SUFFIX}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            for part in (memoryview(whole.head), whole.payload.data):
                done = 0
                while done < len(part):
                    done += os.write(file, part[done:])
            os.fsync(file)
        except BaseException:
            os.close(file)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        os.close(file)
        return path

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the folder's lock: no other process writes meanwhile. Raises OSError if it is not to be had in time."""
        with self._locked:
            until = time.monotonic() + LOCK_WAIT
            while fcntl is not None:
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.005)
            try:
                yield
            finally:
                if fcntl is not None:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def read_into(self, label: Label, out: Bytes) -> None:
        """Reads the rows of exactly this block into `out`, and checks all of them. Thread-safe.

        Raises:
            FileNotFoundError: it is not there (any more).
            FormatError: it must not be used; `out` is then undefined.
            OSError: it cannot be read.
        """
        file = os.open(self.path(label.key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = _read_header(file)
            found = header.label
            if (found.key, found.parent, found.fingerprint, found.start, found.tokens, found.canonical) != (
                *(label.key, label.parent, label.fingerprint, label.start, label.tokens, label.canonical),
            ):
                raise FormatError("other", "it is another object than the one asked for")
            if header.size != len(out):
                raise FormatError("other", f"{header.size} bytes where {len(out)} were asked for")
            view, done = out.data, 0
            while done < len(out):
                got = os.preadv(file, [view[done:]], header.at + done)
                if not got:
                    raise FormatError("truncated", f"{done} of {header.size} bytes")
                done += got
        finally:
            os.close(file)
        if format.checksum(out) != header.checksum:
            raise FormatError("corrupt", "its rows are not what was written")

    def inspect(self, key: bytes) -> Header:
        """The header of an object. Raises what `read_into` raises."""
        file = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_header(file)
        finally:
            os.close(file)

    # ── delete ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def delete(self, key: bytes) -> None:
        self.remove([key])

    def remove(self, keys: Collection[bytes]) -> None:
        """Deletes objects, in one transaction."""
        with self.writing():
            self._remove(keys)

    def _remove(self, keys: Collection[bytes]) -> None:
        self.catalog.remove(keys)
        for key in keys:
            try:
                self.path(key).unlink(missing_ok=True)
            except OSError as error:  # the next start finds it; eviction goes on
                log.warning("cannot delete %s: %s", self.path(key).name, error)

    def quarantine(self, key: bytes) -> None:
        """Puts an object aside that must not be used, so that it can be looked at; the latest few are kept."""
        with self.writing():
            self.catalog.remove([key])
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.path(key), self._quarantine / self.path(key).name)
            kept = sorted(self._quarantine.iterdir(), key=lambda path: path.stat().st_ctime)
            for path in kept[:-KEPT]:
                with contextlib.suppress(OSError):
                    path.unlink()

    # ── what crashes left ────────────────────────────────────────────────────────────────────────────────────────────

    def reconcile(self) -> tuple[list[Label], list[bytes]]:
        """Brings folder and catalogue together: temporary files go, objects without a row get one, rows without an object
        go. Returns what was found and what went.
        """
        with self.writing():
            for path in self._temporary.iterdir():
                path.unlink(missing_ok=True)
            there: set[bytes] = set()
            for entry in os.scandir(self.objects):
                name = entry.name.removesuffix(_SUFFIX)
                with contextlib.suppress(ValueError):
                    there.add(bytes.fromhex(name))
            known = self.catalog.keys()
            gone = sorted(known - there)
            self.catalog.remove(gone)
            found: list[Label] = []
            sizes: list[int] = []
            for key in sorted(there - known):
                try:
                    label = self.inspect(key).label
                    if label.key != key:
                        raise FormatError("other", "its name is not its key")
                except FormatError as error:
                    log.warning("not an object that can be used: %s (%s)", self.path(key).name, error)
                    if error.reason != "newer":
                        os.replace(self.path(key), self._quarantine / self.path(key).name)
                    continue
                found.append(label)
                sizes.append(_allocated(self.path(key)))
            self.catalog.add(zip(found, sizes, strict=True))
        return found, gone

    def rows(self, fingerprint: bytes | None = None, after: int = 0) -> Iterator[Row]:
        return self.catalog.rows(fingerprint, after)

    def __contains__(self, key: bytes) -> bool:
        return self.catalog.get(key) is not None

    def __len__(self) -> int:
        return len(self.catalog)


def _read_header(file: int) -> Header:
    head = os.pread(file, format.ALIGN, 0)
    size = format.header_size(head)
    if size > len(head):
        head += os.pread(file, size - len(head), len(head))
    return format.decode(head[:size], os.fstat(file).st_size)


def _allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
