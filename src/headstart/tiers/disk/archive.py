"""Archive: objects in a tar file, to be taken to another machine. What is derived never leaves this one."""

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
"""Bytes that are taken in at once."""
_FIRST = 32
"""Bytes that say how large a header is."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of an archive's good objects.

    Attributes:
        stored: that were not there, or only damaged or derived.
        known: how many were there already.
        refused: that found no room.
    """

    stored: tuple[Label, ...]
    known: int
    refused: tuple[Label, ...]


def pack(disk: Disk, rows: Iterable[Row], file: Path) -> tuple[list[Label], list[Label]]:
    """Writes objects, each behind what it hangs on; which, and which were left out.

    Left out is what is derived or has been evicted meanwhile, with what hangs on it. Of what is erased meanwhile nothing is in
    the file: it is written anew without. Until it is whole it has no name, so a crash leaves nothing of it.

    Raises:
        ConfigError: the file cannot be written, or an object not be read.
    """
    wanted, left = list[Row](), dict[bytes, Label]()

    def noted() -> Iterator[Row]:
        for row in rows:
            wanted.append(row)
            yield row

    with _nameless(file) as (stream, place):
        packed = _written(disk, stream, noted(), left)
        while True:
            with disk.writing():  # nothing is erased between this look and the name
                keys = {label.key for label in packed}
                erased = keys - disk.catalog.keys()
                erased -= disk.catalog.ghosts(erased)  # which were evicted
                if not erased:
                    place()
                    return packed, list(left.values())
            wanted = [row for row in wanted if row.label.key not in erased]
            left.clear()
            stream.seek(0)
            stream.truncate()
            packed = _written(disk, stream, wanted, left)


def _written(disk: Disk, stream: BinaryIO, rows: Iterable[Row], left: dict[bytes, Label]) -> list[Label]:
    """Writes all rows but those that are `left` out; which."""
    packed: list[Label] = []
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for row in rows:
            portable = row.label.canonical and row.label.parent not in left
            source = _open(disk.path(row.label.key)) if portable else None
            if source is None:
                left[row.label.key] = row.label
                continue
            with source:
                entry = tarfile.TarInfo(disk.path(row.label.key).name)  # which names no user and no time
                entry.size, entry.mode = os.fstat(source.fileno()).st_size, 0o600
                tar.addfile(entry, source)
            packed.append(row.label)
    return packed


@contextlib.contextmanager
def _nameless(file: Path) -> Iterator[tuple[BinaryIO, Callable[[], None]]]:
    """A file for its owner only, and what gives it the name `file`, in place of what had it."""
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
    """A file in a folder that has no name; None where that cannot be had."""
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
    """Reads objects, and checks all of each; those that must not be used are told to `bad`, by their names.

    Raises:
        ConfigError: it is no archive; or later, it cannot be read further.
    """
    try:
        tar = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115  (it holds nothing but `stream`)
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
    """Stores objects where there are none, or none as good. Evicts nothing: it stops storing when there is no room.

    Raises:
        OSError, sqlite3.Error: the latest batch is not stored.
    """
    stored, refused, known = list[Label](), list[Label](), 0
    pinned = {row.label.key for row in disk.catalog.rows() if row.pinned}
    for batch in _batches(objects):
        new = [one for one in batch if not _held(disk, one[0])]
        known += len(batch) - len(new)
        done = [] if refused else disk.write(new, spared=disk.catalog.keys)[0]
        disk.catalog.pin([label.key for label in done if label.key in pinned], True)  # those that were put aside were not
        stored += done
        keys = {label.key for label in done}
        refused += (label for label, _ in new if label.key not in keys)
    return Taken(tuple(stored), known, tuple(refused))


def _held(disk: Disk, label: Label) -> bool:
    """Whether this object, or a better one, is there and good. What is damaged is put aside."""
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
