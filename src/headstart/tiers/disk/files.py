"""Files: durable writes, and the bytes that files really occupy."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("headstart.disk")

Identity = tuple[int, int]


def make(folder: Path) -> None:
    """Makes a folder and its parents, readable by their owner only and durable after a crash. Raises OSError."""
    if folder.is_dir():
        return
    make(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(PermissionError):  # the parent may belong to another user
        sync(folder.parent)


def sync(folder: Path) -> None:
    """Makes new and deleted names in `folder` durable. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write(path: Path, parts: Iterable[memoryview], time: float) -> None:
    """Writes a durable file, readable by its owner only, replacing a file of that name.

    Args:
        time: modification time, in seconds since 1970.

    Raises:
        OSError: it could not be written; no part of it is left.
    """
    file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        for part in parts:
            done = 0
            while done < len(part):
                done += os.write(file, part[done:])
        os.utime(file, (time, time))
        os.fsync(file)
    except BaseException:
        os.close(file)
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    os.close(file)


def read(path: Path) -> bytes:
    """The first 4 KiB of a file. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(file, 4096, 0)
    finally:
        os.close(file)


def clear(folder: Path) -> list[OSError]:
    """Deletes the files in a folder, as far as possible. Returns the errors. Raises OSError if the folder cannot be read."""
    errors = list[OSError]()
    for path in folder.iterdir():
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot delete %s: %s", path.name, error)
            errors.append(error)
    return errors


def empty(folder: Path) -> None:
    """Deletes the files in a folder. No crash brings one back, nor one that went before. Raises OSError if one stays."""
    if errors := clear(folder):
        raise errors[0]
    sync(folder)


def allocated(path: Path) -> int:
    """Bytes that a file occupies on disk. Raises OSError."""
    return os.stat(path, follow_symlinks=False).st_blocks * 512


def occupied(folder: Path) -> int:
    """Bytes that the files in `folder` occupy, without those in subfolders. Raises OSError."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def unit(folder: Path) -> int:
    """The size of the file system's allocation unit, in bytes. Raises OSError."""
    return os.statvfs(folder).f_frsize


def identity(path: Path) -> Identity:
    """Device and inode: they distinguish a file from a later one of the same name. Raises OSError."""
    found = os.stat(path)
    return found.st_dev, found.st_ino
