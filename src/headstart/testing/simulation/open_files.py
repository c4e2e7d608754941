"""Open files: what the calls of the file system return."""

from __future__ import annotations

import stat as modes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(slots=True)
class Stat:
    """What `stat` returns, as far as it is simulated."""

    st_mode: int
    st_dev: int
    st_ino: int
    st_blocks: int
    st_mtime: float
    st_ctime_ns: int
    st_size: int


FOLDER = Stat(modes.S_IFDIR, 1, 0, 0, 0.0, 0, 0)


def stat_of(file: Inode) -> Stat:
    return Stat(modes.S_IFREG, 1, file.number, file.allocated // 512, file.modified, int(file.changed * 1e9), len(file.data))


class FolderEntry:
    """An entry of `scandir`. Its file may be gone when it is asked."""

    __slots__ = ("_find", "_folder", "name")

    def __init__(self, folder: str, name: str, find: Callable[[str, str], Any]) -> None:
        self.name = name
        self._folder = folder
        self._find = find

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        return self._find(self._folder, self.name)


class Entries:
    """What `scandir` returns."""

    def __init__(self, entries: list[FolderEntry]) -> None:
        self._entries = entries

    def __enter__(self) -> Iterator[FolderEntry]:
        return iter(self._entries)

    def __exit__(self, *_: object) -> None:
        return
