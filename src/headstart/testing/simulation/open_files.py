"""Open files: what the calls of the file system return."""

from __future__ import annotations

import stat as modes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from headstart.testing.simulation.disk import Inode
from headstart.testing.simulation.tasks import Process

LOCK_SH, LOCK_EX, LOCK_NB, LOCK_UN = 1, 2, 4, 8


@dataclass(eq=False, slots=True)
class OpenFile:
    """An open file. `file` is None for a folder and for a real file."""

    path: str
    file: Inode | None
    process: Process | None


class FileLocks:
    """Who holds the lock of each file, as `flock` has it."""

    def __init__(self) -> None:
        self._held: dict[int, OpenFile] = {}

    def flock(self, opened: OpenFile, how: int) -> None:
        """Raises BlockingIOError if another open file has the lock."""
        assert opened.file is not None
        if how & LOCK_UN:
            self.drop(opened)
        elif self._held.setdefault(opened.file.number, opened) is not opened:
            raise BlockingIOError(11, "simulated: locked", opened.path)

    def drop(self, opened: OpenFile) -> None:
        if opened.file is not None and self._held.get(opened.file.number) is opened:
            del self._held[opened.file.number]


def stat_of(file: Inode) -> Any:
    return SimpleNamespace(
        st_mode=modes.S_IFREG,
        st_dev=1,
        st_ino=file.number,
        st_blocks=file.allocated // 512,
        st_mtime=file.modified,
        st_ctime_ns=int(file.changed * 1e9),
        st_size=len(file.data),
    )


class FolderEntry:
    """An entry of `scandir`."""

    def __init__(self, name: str, find: Callable[[], Any]) -> None:
        self.name = name
        self._find = find

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        return self._find()


class Entries:
    """What `scandir` returns."""

    def __init__(self, entries: list[FolderEntry]) -> None:
        self._entries = entries

    def __enter__(self) -> Iterator[FolderEntry]:
        return iter(self._entries)

    def __exit__(self, *_: object) -> None:
        return
