"""Files: what the disk tier needs of a file system, durable folders and what files really occupy."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("headstart.disk")

Identity = tuple[int, int]


def make(folder: Path) -> None:
    """Makes a folder for its owner only, and all that leads to it, so that none is lost in a crash. Raises OSError."""
    if folder.is_dir():
        return
    make(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(PermissionError):  # what leads to it may be another's
        sync(folder.parent)


def sync(folder: Path) -> None:
    """Makes durable what has come into `folder` and what has gone. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write(path: Path, parts: Iterable[memoryview], time: float) -> None:
    """Writes a durable file for its owner only, in place of what had its name; `time`: its own, in seconds since 1970.

    Raises:
        OSError: nothing of it is left.
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


def clear(folder: Path) -> None:
    """Deletes what is in a folder, as far as that can be done. Raises OSError if it cannot be read."""
    for path in folder.iterdir():
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot delete %s: %s", path.name, error)


def allocated(path: Path) -> int:
    """Bytes that a file occupies, which its size does not say. Raises OSError."""
    return os.stat(path, follow_symlinks=False).st_blocks * 512


def occupied(folder: Path) -> int:
    """Bytes that the entries of `folder` occupy; those in folders below it not included. Raises OSError."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def unit(folder: Path) -> int:
    """Bytes in multiples of which the file system allocates. Raises OSError."""
    return os.statvfs(folder).f_frsize


def identity(path: Path) -> Identity:
    """What distinguishes a file from another one of its name. Raises OSError."""
    found = os.stat(path)
    return found.st_dev, found.st_ino
