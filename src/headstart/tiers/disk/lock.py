"""Lock: one process at a time writes into a folder. It must still be the folder that the process has opened."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
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
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._locked = threading.Lock()
        self._opened: dict[Path, files.Identity] = {}
        self.watch(path)

    def watch(self, path: Path) -> None:
        """From now on `held` fails if `path` is another file than now. Raises OSError if there is no such file."""
        self._opened[path] = files.identity(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Excludes other threads and processes.

        Raises:
            OSError: the lock was not free in time, or the folder is not the one that was opened.
        """
        with self._locked:
            until = time.monotonic() + WAIT
            while fcntl is not None:
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.005)
            try:
                for path, opened in self._opened.items():
                    if files.identity(path) != opened:
                        raise OSError(errno.ESTALE, "the folder has been made anew", str(path))
                yield
            finally:
                if fcntl is not None:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)
