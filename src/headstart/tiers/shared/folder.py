"""A folder as a shared store: a file system that several machines mount, such as NFS.

    <folder>/hs1/<owner>/<kind>/<first two digits>/<digest>

An object is written to a temporary name beside its own, synced and renamed: readers see it whole or not at all. The file's
modification time is when its text was first stored. A touch sets its access time.

A hung mount cannot be interrupted. So all work is done on other threads, and the caller stops waiting after the time limit. The
threads are daemons, because a hung one must not keep the process from ending. There are few of them: when all hang, calls fail.
A write that was given up has no effect when the mount answers again.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

from headstart.tiers.disk import files
from headstart.tiers.shared.names import parse
from headstart.tiers.shared.store import GROWS, MOST, SLOWEST, TIMEOUT, Blob, Reason, SharedStore, Stored, StoreError, room

THREADS = 8
STEP = 4 << 20
"""Most bytes of one step of reading."""
_TEMPORARY = ".tmp-"
_LEFT = 3600.0  # seconds after which a temporary file was left by a crash; a listing deletes it
_REASONS: dict[int, Reason] = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EACCES: "auth",
    errno.EPERM: "auth",
    errno.EROFS: "auth",
    errno.ESTALE: "refused",
    errno.ENOTCONN: "refused",
    errno.ENODEV: "refused",
    errno.ETIMEDOUT: "timeout",
}

T = TypeVar("T")


class FolderStore(SharedStore):
    """Objects in files under `folder`, which must exist: it is never created.

    Args:
        timeout: seconds that a read waits for its next step. Other calls also have the time that their bytes take at `SLOWEST`.
        clock: seconds since 1970.
    """

    expires = False

    def __init__(self, folder: Path, timeout: float = TIMEOUT, clock: Callable[[], float] = time.time) -> None:
        self.url = folder.absolute().as_uri()
        self._folder = folder
        self._timeout = timeout
        self._clock = clock
        self._free = threading.Semaphore(THREADS)
        self._serial = itertools.count()
        self._mark = secrets.token_hex(4)
        self._closed = False

    def _wait(self, work: Callable[[], T], size: int) -> T:
        """Does `work`, which moves about `size` bytes, on another thread. Raises StoreError if it fails or takes too long."""
        return self._end(self._begin(work), size)

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        if self._closed:
            raise StoreError("closed", "the store was closed")
        if not self._patiently(lambda seconds: self._free.acquire(timeout=seconds), self._timeout):
            raise StoreError("timeout", f"{THREADS} calls hang in {self.url}")
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
            finally:
                self._free.release()

        threading.Thread(target=run, name="shared-folder", daemon=True).start()
        return future

    def _patiently(self, done: Callable[[float], bool], limit: float) -> bool:
        """Waits until `done(seconds)`, but not `limit` seconds without a step of any read. Returns whether it is done."""
        seen = None
        while seen != self.received:
            seen = self.received
            if done(limit):
                return True
        return False

    def _end(self, future: Future[T], size: int = 0) -> T:
        limit = self._timeout + size / SLOWEST
        if not self._patiently(lambda seconds: bool(wait([future], seconds).done), limit):
            raise StoreError("timeout", f"{self.url}: no answer in {limit:.2f} s")
        try:
            return future.result()
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, "other")
            raise StoreError(reason, f"{os.strerror(error.errno or 0)} in {self.url}") from None

    def _check(self) -> None:
        """Raises StoreError if the folder is not there, as when nothing is mounted: what it holds is not deleted, only away."""
        if not self._folder.is_dir():
            raise StoreError("refused", f"{self.url} is not a folder; create it, or mount it")

    def _path(self, name: str) -> Path:
        parts = parse(name)
        if parts is None:
            raise ValueError("not a name of an object")
        return self._folder.joinpath(name.rpartition("/")[0], parts.digest[:2], parts.digest)

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, names: Sequence[str], most: int = MOST) -> list[Blob | None]:
        found: list[Blob | None] = []
        for at in range(0, len(names), THREADS):
            pending = [self._begin(partial(self._read, self._path(name), most)) for name in names[at : at + THREADS]]
            found += [self._end(future) for future in pending]
        if not any(blob is not None for blob in found):
            self._wait(self._check, 0)
        return found

    def _read(self, path: Path, most: int) -> Blob | None:
        """The first bytes of a file, at most `most`; None if it is not there, or became shorter meanwhile. Raises OSError."""
        try:
            with open(path, "rb", buffering=0) as file:
                data = room(min(most, os.fstat(file.fileno()).st_size))
                done = 0
                while done < len(data):
                    if not (got := file.readinto(data[done : done + STEP])):
                        return None
                    self.received += 1
                    done += got
                return data
        except FileNotFoundError:
            return None

    def have(self, names: Sequence[str]) -> list[bool]:
        paths = [self._path(name) for name in names]

        def work() -> list[bool]:
            there = [path.exists() for path in paths]
            if not any(there):
                self._check()
            return there

        return self._wait(work, 0)

    def objects(self, prefix: str = "") -> Iterator[Stored]:
        found = self._wait(lambda: list(self._walk(prefix)), 1 << 30)
        return iter(found)

    def _walk(self, prefix: str) -> Iterator[Stored]:
        now = self._clock()
        for name, path in self._files(prefix):
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(path)
                if parse(name):
                    yield Stored(name, stat.st_size, now - stat.st_mtime)
                elif path.name.startswith(_TEMPORARY) and now - stat.st_ctime > _LEFT:
                    os.unlink(path)

    def _files(self, prefix: str) -> Iterator[tuple[str, Path]]:
        """All files whose names begin with `prefix`, also temporary ones."""
        self._check()
        top = self._folder.joinpath(*prefix.split("/")[:-1])  # a prefix ends within a folder's name, or with "/"
        for folder, _, inner in os.walk(top, onerror=_unreadable):
            parent = Path(folder).relative_to(self._folder).parent.as_posix()
            yield from ((f"{parent}/{file}", Path(folder, file)) for file in inner if f"{parent}/{file}".startswith(prefix))

    def warnings(self, term: float = math.inf) -> list[str]:
        return [GROWS] if term == math.inf else []

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, name: str, data: Blob, *, age: float = 0.0, life: float = math.inf) -> bool:
        return self._put(name, data, age, os.replace)

    def put_new(self, name: str, data: Blob, *, age: float = 0.0, life: float = math.inf) -> bool:
        return self._put(name, data, age, _link)

    def _put(self, name: str, data: Blob, age: float, place: Callable[[Path, Path], None]) -> bool:
        path = self._path(name)
        temporary = path.with_name(f"{_TEMPORARY}{self._mark}-{next(self._serial)}")
        given_up = False  # the caller waits no longer: it may have deleted the object meanwhile

        def work() -> bool:
            if place is _link and path.exists():
                return False
            self._check()
            files.make(path.parent)
            try:
                files.write(temporary, [data], self._clock() - age)
                if given_up:
                    return False
                place(temporary, path)
                if given_up:
                    path.unlink(missing_ok=True)
            except FileExistsError:
                return False
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            return True

        try:
            return self._wait(work, len(data))
        except StoreError:
            given_up = True
            raise

    def touch(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]

        def work() -> None:
            for path in paths:
                _touch(path, self._clock())

        self._wait(work, 0)

    def limit(self, lives: Sequence[tuple[str, float]]) -> None:
        pass  # `expiry.sweep` deletes

    def delete(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]

        def work() -> None:
            self._check()
            for path in paths:
                path.unlink(missing_ok=True)

        self._wait(work, len(paths) << 10)

    def clean(self, prefix: str = "") -> None:
        def work() -> None:
            for _, path in self._files(prefix):
                if path.name.startswith(_TEMPORARY):
                    path.unlink(missing_ok=True)

        self._wait(work, 1 << 30)

    def close(self) -> None:
        self._closed = True


def _unreadable(error: OSError) -> None:
    """A listing must not leave out what it cannot read, or a deletion would."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _link(temporary: Path, path: Path) -> None:
    """Gives the file its name only if nobody has it. Raises FileExistsError, OSError."""
    os.link(temporary, path)


def _touch(path: Path, now: float) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.utime(path, (now, path.stat().st_mtime))
