"""Lock: lets one process at a time write into a folder, if it is still the folder that the process has opened."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headstart.tiers.disk import files

try:
    import fcntl
except ImportError:  # pragma: no cover  (Windows: one process a folder)
    fcntl = None  # type: ignore[assignment]

WAIT = 10.0
"""Most seconds to wait for another process."""


class Lock:
    """A file that is locked while a process writes. Raises OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._locked = threading.Lock()
        self._opened: dict[Path, files.Identity] = {}
        self._use(_open(path))

    def _use(self, file: int) -> None:
        try:
            found = os.fstat(file)
        except BaseException:
            os.close(file)
            raise
        self._file, self._opened[self._path] = file, (found.st_dev, found.st_ino)

    def watch(self, path: Path, opened: files.Identity) -> None:
        """From now on `held` fails if `path` is another file than the one that was `opened`."""
        self._opened[path] = opened

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Excludes other threads and processes.

        Raises:
            OSError: the lock was not free in time, or the folder is not the one that was opened.
        """
        with self._exclusive():
            self.compare()
            yield

    def compare(self) -> None:
        """Raises OSError if the folder is not the one that was opened, or another process has replaced its catalogue."""
        for path in self._opened:
            self.same(path)

    def same(self, path: Path) -> None:
        """Raises OSError if a file that is watched, or the lock itself, is another one now."""
        try:
            found = files.identity(path)
        except FileNotFoundError:
            found = None
        if found != self._opened[path]:
            raise OSError(errno.ESTALE, "the folder was replaced by another one", str(path))

    @contextlib.contextmanager
    def renewed(self, needed: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Excludes others, like `held`, but compares nothing: if another process has renewed the lock, the new one is taken.

        If `needed` is true, it also excludes for good all processes that have opened the folder before: their `held` fails, and
        they must open the folder again. `needed` is called under the lock.

        Raises:
            OSError: the lock was not free in time, or the file cannot be replaced.
        """
        with self._exclusive():
            if self.stale:
                self._reopen()
                _acquire(self._file)
            elif needed():
                self._replace()
            yield

    def _replace(self) -> None:
        new = self._path.with_suffix(".new")
        file, before = _open(new), self._file
        try:
            _acquire(file)
            os.replace(new, self._path)
        except BaseException:
            os.close(file)
            raise
        self._use(file)
        os.close(before)

    @property
    def stale(self) -> bool:
        """Whether another process has `renewed` the lock. Raises OSError."""
        return files.identity(self._path) != self._opened[self._path]

    def _reopen(self) -> None:
        before = self._file
        self._use(_open(self._path))
        os.close(before)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._locked:
            _acquire(self._file)
            try:
                yield
            finally:
                if fcntl is not None:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)


def _open(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _acquire(file: int) -> None:
    until = time.monotonic() + WAIT
    while fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)
