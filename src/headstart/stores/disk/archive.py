"""Archive: objects in a tar file, to be taken to another machine. What is derived never leaves this one."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from headstart.errors import ConfigError
from headstart.stores.base import Bytes
from headstart.stores.disk.catalog import Row
from headstart.stores.disk.format import FormatError, Label, checksum, decode, header_size
from headstart.stores.disk.store import Disk

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

    Left out is what is derived or has been evicted meanwhile, with what hangs on it.

    Raises:
        ConfigError: the file cannot be written, or an object not be read.
    """
    packed, left = list[Label](), dict[bytes, Label]()
    with _replacing(file) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
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
    return packed, list(left.values())


@contextlib.contextmanager
def _replacing(file: Path) -> Iterator[BinaryIO]:
    """A file for its owner only, which takes `file`'s place when it is whole."""
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"Cannot write {file}: it is no plain file.")
        number, name = tempfile.mkstemp(prefix=".headstart-", suffix=".tar", dir=file.parent)
        try:
            with os.fdopen(number, "wb") as stream:
                yield stream
            os.replace(name, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"Cannot write {file}: {error.strerror or error}.") from error


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
