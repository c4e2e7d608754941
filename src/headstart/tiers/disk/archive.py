"""Archive: a tar file of objects, for another machine. Derived objects are not exported."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from headstart.errors import ConfigError
from headstart.interfaces.tokens import Bytes
from headstart.tiers.disk.catalog import Row
from headstart.tiers.disk.format import FormatError, Label, checksum, decode, header_size
from headstart.tiers.disk.store import Disk

BATCH = 32 << 20
"""Bytes that are imported in one batch."""
_FIRST = 32
"""The first bytes of an object, which contain the size of its header."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of an import.

    Attributes:
        stored: objects that were missing before, or only there as damaged or derived ones.
        known: number of objects that were there already.
        refused: objects for which there was no room.
    """

    stored: tuple[Label, ...]
    known: int
    refused: tuple[Label, ...]


def pack(disk: Disk, rows: Iterable[Row], file: Path) -> tuple[list[Label], list[Label]]:
    """Writes objects to an archive, parents first. Returns the labels of those written and of those left out.

    Derived objects, and objects that are evicted meanwhile, are left out, with all that follow them. If an object is deleted
    meanwhile, the file is written again without it. The file has no name until it is complete, so a crash leaves nothing.

    Raises:
        ConfigError: the file cannot be written, or an object cannot be read.
    """
    wanted, left = list[Row](), dict[bytes, Label]()

    def noted() -> Iterator[Row]:
        for row in rows:
            wanted.append(row)
            yield row

    with _nameless(file) as (stream, place):
        packed = _written(disk, stream, noted(), left)
        while True:
            with disk.writing():  # nothing is deleted between this check and the naming
                keys = {label.key for label in packed}
                erased = keys - disk.catalog.keys()
                erased -= disk.catalog.ghosts(erased)  # these were evicted, not deleted
                if not erased:
                    place()
                    return packed, list(left.values())
            wanted = [row for row in wanted if row.label.key not in erased]
            left.clear()
            stream.seek(0)
            stream.truncate()
            packed = _written(disk, stream, wanted, left)


def _written(disk: Disk, stream: BinaryIO, rows: Iterable[Row], left: dict[bytes, Label]) -> list[Label]:
    """Writes the objects of all rows, and returns the labels. Objects that cannot go are added to `left`."""
    packed: list[Label] = []
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for row in rows:
            portable = row.label.canonical and row.label.parent not in left
            source = _open(disk.path(row.label.key)) if portable else None
            if source is None:
                left[row.label.key] = row.label
                continue
            with source:
                entry = tarfile.TarInfo(disk.path(row.label.key).name)  # it contains no user and no time
                entry.size, entry.mode = os.fstat(source.fileno()).st_size, 0o600
                tar.addfile(entry, source)
            packed.append(row.label)
    return packed


@contextlib.contextmanager
def _nameless(file: Path) -> Iterator[tuple[BinaryIO, Callable[[], None]]]:
    """A file that only its owner may read, and a function that names it `file`. An older file of that name is replaced."""
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"Cannot write {file}: it is no plain file.")
        name = file.parent / f".headstart-{os.getpid()}-{secrets.token_hex(4)}.tar"
        number = _open_nameless(file.parent)
        named = number is None
        if number is None:
            number = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(number, "w+b") as stream:

                def place() -> None:
                    stream.flush()
                    if not named:
                        os.link(f"/proc/self/fd/{stream.fileno()}", name, src_dir_fd=stream.fileno(), follow_symlinks=True)
                    os.replace(name, file)

                yield stream, place
        finally:
            name.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write {file}: {error.strerror or error}.") from error


def _open_nameless(folder: Path) -> int | None:
    """A file without a name in a folder; None if the system has no such files."""
    if not (hasattr(os, "O_TMPFILE") and Path("/proc/self/fd").is_dir()):
        return None
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return None
        raise


def _open(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error


def unpack(stream: BinaryIO, bad: Callable[[str, FormatError], None]) -> Iterator[tuple[Label, Bytes]]:
    """Reads and checks objects. `bad` is called with the name of each object that must not be used.

    Raises:
        ConfigError: the file is no archive, or (later) reading it failed.
    """
    try:
        tar = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115  (it has no file of its own)
    except (OSError, tarfile.TarError):
        raise ConfigError(f"{stream.name} is no tar file of `headstart cache export`.") from None
    return _objects(tar, stream.name, bad)


def _objects(tar: tarfile.TarFile, name: str, bad: Callable[[str, FormatError], None]) -> Iterator[tuple[Label, Bytes]]:
    try:
        for entry in tar:
            try:
                yield _object(tar, entry)
            except FormatError as error:
                bad(entry.name, error)
    except (OSError, ValueError, tarfile.TarError) as error:
        raise ConfigError(f"Cannot read {name}: {error}.") from error


def _object(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> tuple[Label, Bytes]:
    file = tar.extractfile(entry) if entry.isfile() and not entry.issparse() else None
    if file is None:
        raise FormatError("foreign", "not a file")
    head = file.read(_FIRST)
    head += file.read(header_size(head) - _FIRST)
    header = decode(head, entry.size)
    payload = np.frombuffer(file.read(header.size), np.uint8)
    if checksum(payload) != header.checksum:
        raise FormatError("corrupt", "its content is not what was written")
    return header.label, payload


def take(disk: Disk, objects: Iterable[tuple[Label, Bytes]]) -> Taken:
    """Stores the objects that are missing, or only there in a worse version. Evicts nothing: it stops when there is no room.

    What a user deletes meanwhile does not come back.

    Raises:
        OSError, sqlite3.Error: the last batch is not stored.
    """
    stored, refused, known = list[Label](), list[Label](), 0
    there, (wiped, _) = disk.catalog.keys(), disk.catalog.ages.wiped()
    pinned, deleted = set[bytes](), set[bytes]()

    def wanted(label: Label) -> bool:
        (latest, _), key = disk.catalog.ages.wiped(), label.key
        erased = key in there and key not in disk and not disk.catalog.ghosts([key])  # it has left no ghost
        if erased or (latest != wiped and label.written <= latest):
            deleted.add(key)
        return key not in deleted

    for batch in _batches(objects):
        new = []
        for one in batch:
            before = disk.catalog.get(one[0].key)
            if not _held(disk, one[0]):
                new.append(one)
                if before is not None and before.pinned and one[0].key not in disk:
                    pinned.add(one[0].key)  # it is in quarantine now, and has lost its pin
        known += len(batch) - len(new)
        done = [] if refused else disk.write(new, spared=disk.catalog.keys, wanted=wanted)[0]
        keys = {label.key for label in done}
        disk.catalog.pin(keys & pinned)
        stored += done
        there.update(keys)
        refused += (label for label, _ in new if label.key not in keys | deleted)
    return Taken(tuple(stored), known, tuple(refused))


def _held(disk: Disk, label: Label) -> bool:
    """Whether this object, or a better one, is there and good. A damaged object goes into quarantine, and leaves a ghost."""
    row = disk.quarantine(label.key)
    return row is not None and row.label.canonical >= label.canonical


def _batches(objects: Iterable[tuple[Label, Bytes]]) -> Iterator[list[tuple[Label, Bytes]]]:
    batch, size = list[tuple[Label, Bytes]](), 0
    for label, payload in objects:
        batch.append((label, payload))
        size += len(payload)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
