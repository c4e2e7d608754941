"""Download: fetches one file into the cache, goes on where an earlier attempt ended, and checks its hash.

Whatever ends the process, the cache is whole: a file is complete under its hash, or it is partial under another name. One
process at a time fetches a file; the others wait for it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from headstart.errors import HubError
from headstart.hub.cache import HubCache
from headstart.hub.client import HubClient, Interrupted, Repository
from headstart.hub.progress import Meter, OnProgress
from headstart.hub.record import Fetched, FetchRecord
from headstart.hub.variants import WeightFile

ATTEMPTS = 5
"""Attempts without a new byte after which a download is given up."""
PAUSE = 1.0
"""Seconds before the second attempt; twice as many before each further one."""
_LOOK = 0.2
"""Seconds between two looks at a file that another process fetches."""
_BLOCK = 1 << 20


class Hasher(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def hasher(digest: str, size: int) -> Hasher:
    """What computes the hash that a hub names: SHA-256 of large files, and git's of small ones."""
    if len(digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def missing(cache: HubCache, file: WeightFile) -> int:
    """Bytes of a file that still have to be fetched."""
    if cache.blob(file.digest).exists():
        return 0
    return max(0, file.size - _size(cache.partial(file.digest)))


def download(
    client: HubClient, repository: Repository, file: WeightFile, cache: HubCache, record: FetchRecord, report: OnProgress
) -> None:
    """Fetches the content of a file, if it is not here. It is noted as headstart's before its first byte is here. If another
    program has fetched it, it is noted that headstart was asked to.

    Raises:
        HubError: the hub refuses, the connection broke too often, or the content has another hash.
        OSError: it cannot be written.
    """
    meter = Meter(file.path, file.size, file.digest, report)
    blob, partial = cache.blob(file.digest), cache.partial(file.digest)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with _alone(cache.lock(file.digest), lambda: meter.at(min(_size(partial), file.size - 1))):
        if blob.exists():
            if partial.exists():  # another program has fetched it since, so it is not headstart's
                partial.unlink()
                record.forget(repository.repo, file.digest)
            if record.get(repository.repo, file.digest) is None:
                record.add(file.digest, Fetched(repository.repo, file.path, file.size, own=False))
            meter.at(file.size)
            return
        record.add(file.digest, Fetched(repository.repo, file.path, file.size))
        try:
            _fetch(client, repository, file, partial, meter)
            os.replace(partial, blob)
        finally:
            if not _size(partial):
                partial.unlink(missing_ok=True)
            if not (blob.exists() or partial.exists()):
                record.forget(repository.repo, file.digest)


def _fetch(client: HubClient, repository: Repository, file: WeightFile, partial: Path, meter: Meter) -> None:
    """Completes a partial file and checks it."""
    with partial.open("a+b") as out:
        seen = _resume(out.fileno(), partial, file, meter)
        failures = 0
        while seen.done < file.size:
            before = seen.done
            try:
                with client.content(repository, file, seen.done) as content:
                    if content.start != seen.done:
                        seen = seen.begin_again()
                    seen.take(content.chunks)
                if seen.done == before:
                    raise Interrupted(f"{client.endpoint} sends nothing of {file.path}.")
            except Interrupted as error:
                failures = 0 if seen.done > before else failures + 1
                if failures == ATTEMPTS:
                    raise HubError(f"{error} What is here of {file.path} is kept: the same command goes on with it.") from None
                time.sleep(PAUSE * 2 ** max(0, failures - 1))
        out.flush()
        os.fsync(out.fileno())
    if seen.hash.hexdigest() != file.digest:
        partial.unlink()
        raise HubError(
            f"{file.path} arrived with another hash than {client.endpoint} names, and was removed: fetch it again. If that "
            "does not help, something changes it on its way, like a proxy."
        )
    meter.at(file.size)


class _Seen:
    """The bytes of a partial file, and their hash."""

    def __init__(self, out: int, file: WeightFile, meter: Meter) -> None:
        self._out, self._file, self._meter = out, file, meter
        self.hash, self.done = hasher(file.digest, file.size), 0

    def begin_again(self) -> _Seen:
        os.ftruncate(self._out, 0)
        return _Seen(self._out, self._file, self._meter)

    def add(self, data: bytes) -> None:
        self.hash.update(data)
        self.done += len(data)

    def take(self, chunks: Iterator[bytes]) -> None:
        """Writes what arrives. Raises HubError if it is more than the file has."""
        for chunk in chunks:
            if self.done + len(chunk) > self._file.size:
                raise HubError(f"The hub sends more bytes of {self._file.path} than it says that there are; fetch it again.")
            view = memoryview(chunk)
            while view:
                view = view[os.write(self._out, view) :]
            self.add(chunk)
            if self.done < self._file.size:
                self._meter.at(self.done)


def _resume(out: int, partial: Path, file: WeightFile, meter: Meter) -> _Seen:
    """Reads what an earlier attempt has left, for its hash."""
    seen = _Seen(out, file, meter)
    if _size(partial) > file.size:
        return seen.begin_again()
    with partial.open("rb") as left:
        while block := left.read(_BLOCK):
            seen.add(block)
    meter.at(min(seen.done, file.size - 1))
    return seen


@contextmanager
def _alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock that all programs with this cache respect. `waiting` is called while another process has it."""
    from filelock import FileLock, SoftFileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock: FileLock | SoftFileLock = FileLock(path, mode=0o664)
    while True:
        try:
            lock.acquire(timeout=_LOOK, poll_interval=_LOOK / 2)
            break
        except Timeout:
            waiting()
        except NotImplementedError:  # a file system without locks: so does `huggingface_hub`
            lock = SoftFileLock(path)
    try:
        yield
    finally:
        lock.release()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
