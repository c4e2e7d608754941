"""Digest: a hash of a file's content.

Reading a large model takes a while. So its digest is stored, and used as long as the file's path, size, inode and times are the
same. The times include that of the last change of any kind, which cannot be set.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3

from headstart.engines.memo import recall, remember

MEMO = "digests.json"
_CHUNK = 64 << 20
_known: dict[str, tuple[list[int], bytes]] = {}


def digest(path: Path, memo: Path | None = None, progress: Callable[[int], None] | None = None) -> bytes:
    """BLAKE3 of a file's bytes.

    Args:
        memo: folder that stores it for later processes; this process keeps it anyway.
        progress: receives numbers of bytes, each since the call before.

    Raises:
        OSError: the file cannot be read.
    """
    name, look = str(path.resolve()), _look(path)
    found = _known.get(name) or _remembered(memo).get(name)
    if found is None or found[0] != look:
        found = look, _read(path, progress)
        _remember(memo, name, found)
    elif progress is not None:
        progress(look[0])
    _known[name] = found
    return found[1]


def digests(paths: Sequence[Path], memo: Path | None, progress: Callable[[float], None]) -> list[bytes]:
    """The digests of several files. `progress` receives the share that was read, from 0 to 1."""
    total, done = sum(path.stat().st_size for path in paths) or 1, 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        progress(min(1.0, done / total))

    return [digest(path, memo, read) for path in paths]


def _look(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read(path: Path, progress: Callable[[int], None] | None) -> bytes:
    hasher = blake3(max_threads=blake3.AUTO)
    if not path.stat().st_size:  # cannot be mapped
        return hasher.digest()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
        for start in range(0, len(view), _CHUNK):
            with view[start : start + _CHUNK] as chunk:
                hasher.update(chunk)
                if progress is not None:
                    progress(len(chunk))
    return hasher.digest()


def _remembered(folder: Path | None) -> dict[str, tuple[list[int], bytes]]:
    """Digests that earlier processes stored."""
    try:
        return {name: (list(map(int, look)), bytes.fromhex(found)) for name, (look, found) in recall(folder, MEMO).items()}
    except (ValueError, TypeError, OverflowError):
        return {}


def _remember(folder: Path | None, name: str, found: tuple[list[int], bytes]) -> None:
    known = {path: one for path, one in _remembered(folder).items() if os.path.exists(path)} | {name: found}
    remember(folder, MEMO, {path: [look, content.hex()] for path, (look, content) in known.items()})
