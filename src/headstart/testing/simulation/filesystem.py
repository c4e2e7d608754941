"""Filesystem: the system calls of all processes on the virtual disk.

Each call takes virtual time, so other tasks run during it, and meets the fault that is armed for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstart.testing.simulation.disk import VirtualDisk
from headstart.testing.simulation.faults import CRASHES, ERRNOS, Faults, os_error
from headstart.testing.simulation.kernel import world
from headstart.testing.simulation.open_files import FOLDER, Entries, FileLocks, FolderEntry, OpenFile, stat_of
from headstart.testing.simulation.tasks import Process

SECONDS = {"write": 2e-4, "fsync": 4e-3, "rename": 1e-4, "unlink": 1e-4, "read": 4e-4}
"""Most virtual seconds of a call; others take up to 50 µs."""
ROOT = "/cache"
"""The folder of the cache on the virtual disk."""
_REAL = "index.sqlite"
"""Names that begin like this are files of SQLite, which are real."""


class FileSystem:
    """The calls of all processes.

    Args:
        real: the folder of the files of SQLite; a power failure changes it.

    Attributes:
        crash: called for a crash in this call: `power_loss` or `kill`.
        synced: called when a file has been made durable.
        dropped: called when a catalogue is deleted, because it is damaged.
        missing: keys of objects that somebody else has deleted, which took their pins.
        gone: those that were not stored again.
        renewed: keys of objects that one process has deleted, and another one has written again and not yet synced. The
            latter may believe in those that were deleted.
        put_aside: keys of objects that a server has put into quarantine.
        unlooked: since when there may be files that have outlived their term, up to the next look: one could not be deleted,
            or they are known again. In seconds since 1970.
        undeleted: keys of objects that could not be deleted, each with the process that has tried it last.
    """

    def __init__(self, disk: VirtualDisk, faults: Faults, real: Path) -> None:
        self.disk = disk
        self.faults = faults
        self.real = real
        self.crash: Callable[[str], None] = lambda kind: None
        self.synced: Callable[[], None] = lambda: None
        self.dropped: Callable[[], None] = lambda: None
        self.missing: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.renewed: set[bytes] = set()
        self._deleted: dict[bytes, Process] = {}  # by whom
        self.put_aside: set[bytes] = set()
        self.unlooked = float("-inf")
        self.undeleted: dict[bytes, Process] = {}
        self._opened: dict[int, OpenFile] = {}
        self._next = 1000
        self._locks = FileLocks()
        self._real_names: list[str] | None = None  # what is known of SQLite's files since it has changed them
        self._real_stats: dict[str, os.stat_result] = {}
        self.after_crash: dict[str, bytes] | None = None  # what a torn commit leaves of the catalogue
        self.unsynced: dict[str, bytes] | None = None  # the catalogue before its first commit that need not be durable yet

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def call(self, name: str, path: str) -> str | None:
        """Time passes, and a fault may be met. Returns a fault that the caller must carry out.

        Only the folder of the cache is on the disk that fails. Other paths, as that of a model's weights, are not.
        """
        here = world()
        here.alive()
        kind = self.faults.take(name) if path == ROOT or path.startswith(f"{ROOT}/") else None
        if here.trace is not None:
            here.say(f"{name} {path} {kind or ''}")
        if kind is not None:
            if kind in CRASHES:
                self.faults.counts[kind] += 1
                self.crash(CRASHES[kind])
                here.alive()
            elif kind in ERRNOS:
                self.faults.counts[kind] += 1
                raise os_error(kind, path)
            elif kind == "slow":
                self.faults.counts[kind] += 1
                here.pause(3.0)
            elif kind in ("hung", "hung_read"):
                self.faults.counts[kind] += 1
                here.sleep(12.0 + 30.0 * here.dice.random())
        here.pause(SECONDS.get(name, 5e-5))
        return kind

    def leave(self, process: Process) -> None:
        """A process has died: its files are closed, and its locks are free."""
        for number in [number for number, opened in self._opened.items() if opened.process is process]:
            self._close(number)

    def lose_power(self) -> None:
        self.real_changes()
        self.unsynced = None
        self._opened.clear()
        self._locks = FileLocks()

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_real(self, path: str) -> str | None:
        """The real path of a file of SQLite; None for all others."""
        name = path.rpartition("/")[2]
        return f"{self.real}/{name}" if name.startswith(_REAL) else None

    def now(self) -> float:
        return world().wall

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        name = str(path)
        reads = not flags & (os.O_WRONLY | os.O_RDWR) and name not in self.disk.names
        kind = self.call("look" if reads else "open", name)
        file = None
        if (real := self.is_real(name)) is not None:
            os.close(os.open(real, flags, mode))
            self.real_changes()
        elif name not in self.disk.names:
            if kind == "missing" and self._is_object(name) and self.disk.lose(name):
                self.faults.counts[kind] += 1
                self.missing.add(_key_of(name))
                self.gone.add(_key_of(name))
            try:
                file = self.disk.file(name)
                if flags & os.O_EXCL:
                    raise FileExistsError(17, "simulated: exists", name)
            except FileNotFoundError:
                if not flags & os.O_CREAT:
                    raise
                file = self.disk.create(name, self.now())
            if flags & os.O_TRUNC and file.data:
                file.data.clear()
        self._next += 1
        task = world().task
        self._opened[self._next] = OpenFile(name, file, None if task is None else task.process)
        return self._next

    def _of(self, number: int) -> OpenFile:
        world().alive()
        return self._opened[number]

    def _is_object(self, path: str) -> bool:
        return path.rpartition("/")[0].endswith("/objects")

    def close(self, number: int) -> None:
        world().alive()
        self._close(number)

    def _close(self, number: int) -> None:
        opened = self._opened.pop(number)
        self._locks.drop(opened)

    def write(self, number: int, data: Any) -> int:
        opened = self._of(number)
        kind = self.call("write", opened.path)
        assert opened.file is not None
        new = bytes(data)
        if kind == "short_write" and len(new) > 1:
            self.faults.counts[kind] += 1
            new = new[: world().dice.randrange(1, len(new))]
        opened.file.write(len(opened.file.data), new)
        opened.file.modified = self.now()
        return len(new)

    def _read(self, number: int, size: int, at: int) -> bytes:
        opened = self._of(number)
        kind = self.call("read", opened.path)
        file = opened.file
        assert file is not None
        if kind in ("bit_rot", "cut") and self._is_object(opened.path) and at < len(file.data):
            self.faults.counts[kind] += 1
            file.rotten = True
            last = min(at + size, len(file.data))
            if kind == "cut":
                del file.data[world().dice.randrange(at, last) :]
            else:
                file.data[world().dice.randrange(at, last)] ^= 1 << world().dice.randrange(8)
            file.sync()
        data = bytes(file.data[at : at + size])
        if kind == "short_read" and len(data) > 1:
            self.faults.counts[kind] += 1
            data = data[: world().dice.randrange(1, len(data))]
        return data

    def pread(self, number: int, size: int, at: int) -> bytes:
        return self._read(number, size, at)

    def preadv(self, number: int, buffers: list[Any], at: int) -> int:
        data = self._read(number, len(buffers[0]), at)
        buffers[0][: len(data)] = data
        return len(data)

    def fsync(self, number: int) -> None:
        opened = self._of(number)
        self.call("fsync", opened.path)
        if opened.file is None:
            self.disk.sync_folder(opened.path)
            if opened.path == f"{ROOT}/objects":
                self.renewed.clear()
        else:
            opened.file.sync()
            self.synced()

    def utime(self, file: Any, times: tuple[float, float]) -> None:
        found = self._of(file).file if isinstance(file, int) else self.disk.file(str(file))
        assert found is not None
        found.modified = times[1]

    def replace(self, old: Any, new: Any) -> None:
        self.call("rename", str(new))
        if (real := self.is_real(str(new))) is not None:
            before = self.is_real(str(old))
            assert before is not None
            os.replace(before, real)
            self.unsynced = None
            self.real_changes()
            return
        if self._is_object(str(old)):
            self.put_aside.add(_key_of(str(old)))
        self.disk.rename(str(old), str(new), self.now())
        if self._is_object(str(new)):
            key, task = _key_of(str(new)), world().task
            self.gone.discard(key)
            if task is not None and self._deleted.pop(key, task.process) is not task.process:
                self.renewed.add(key)

    def unlink(self, path: Any) -> None:
        name = str(path)
        try:
            self.call("unlink", name)
        except OSError:
            self.unlooked = self.now()
            if self._is_object(name) and (task := world().task) is not None:
                self.undeleted[_key_of(name)] = task.process
            raise
        if (real := self.is_real(name)) is not None:
            if name.endswith(_REAL):
                self.dropped()
            self.unsynced = None
            os.unlink(real)
            self.real_changes()
        else:
            self.disk.unlink(name)
            if self._is_object(name) and (task := world().task) is not None:
                self._deleted[_key_of(name)] = task.process

    def scandir(self, path: Any) -> Entries:
        folder = str(path)
        self.call("list", folder)
        if folder not in self.disk.names:
            raise FileNotFoundError(2, "simulated: no such folder", folder)
        names = list(self.disk.names[folder])
        if folder == ROOT:
            names += self._real_files()
        return Entries([FolderEntry(folder, name, self._entry) for name in names])

    def _entry(self, folder: str, name: str) -> Any:
        if name.startswith(_REAL):
            if (known := self._real_stats.get(name)) is None:
                known = self._real_stats[name] = os.stat(f"{self.real}/{name}")
            return known
        return stat_of(self.disk.file(f"{folder}/{name}"))

    def _real_files(self) -> list[str]:
        """The files of SQLite, in order. They are asked once as long as SQLite does nothing."""
        if self._real_names is None:
            self._real_names = sorted(os.listdir(self.real))
        return self._real_names

    def written_back(self) -> int:
        """Changes when SQLite writes its log back, which syncs it first."""
        path = f"{self.real}/{_REAL}"
        return os.stat(path).st_mtime_ns if os.path.exists(path) else 0

    def real_changes(self) -> None:
        """SQLite does something with its files."""
        self._real_names = None
        self._real_stats.clear()

    def stat(self, path: Any, *, follow_symlinks: bool = True) -> Any:
        name = str(path)
        if self.is_real(name) is not None:
            self.call("stat", name)
            return self._entry(ROOT, name.rpartition("/")[2])
        if name in self.disk.names:
            return FOLDER
        self.call("stat", name)
        return stat_of(self.disk.file(name))

    def fstat(self, number: int) -> Any:
        found = self._of(number).file
        assert found is not None
        return stat_of(found)

    def free(self) -> int:
        """Bytes that other programs have left, for a program."""
        self.faults.counts["little_space"] += self.disk.short
        self.disk.short = False
        return self.disk.free

    # ── locks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def flock(self, number: int, how: int) -> None:
        self._locks.flock(self._of(number), how)


def _key_of(path: str) -> bytes:
    """The key of the object in a file."""
    return bytes.fromhex(path.rpartition("/")[2].split(".")[0])


_systems: list[FileSystem] = []


def system() -> FileSystem:
    """The file system of the history that runs."""
    return _systems[-1]
