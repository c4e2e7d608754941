"""Lock: one process at a time writes into a folder, and only into the one that it has opened."""

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
"""Seconds to wait for another process's write."""


class Lock:
    """A file that is locked by who writes. Raises OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._locked = threading.Lock()
        self._opened: dict[Path, files.Identity] = {}
        self.watch(path)

    def watch(self, path: Path) -> None:
        """Refuses to lock once there is another file of this name. Raises OSError if there is none now."""
        self._opened[path] = files.identity(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other threads and processes out.

        Raises:
            OSError: it is not to be had in time, or the folder is no longer the one that was opened.
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
