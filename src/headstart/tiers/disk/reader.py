"""Reader: reads and checks one object. Thread-safe."""

from __future__ import annotations

import os
from collections.abc import Callable

from headstart.interfaces.tier import KV
from headstart.interfaces.tokens import Bytes
from headstart.tiers.disk import format
from headstart.tiers.disk.format import FormatError, Header, Label

_STEP = 16 << 20
"""Most bytes of one call to read."""


def read(path: str, label: Label, out: Bytes, count: Callable[[int], None]) -> int:
    """Reads an object into `out`, and checks all of it. Returns its bytes. `count` is called with the bytes of each step.

    KV must fill `out`; a checkpoint may be smaller. In place of a derived object, a canonical one that replaced it is read.

    Raises:
        FileNotFoundError: the object is missing.
        FormatError: the object must not be used; `out` is then undefined.
        OSError: the object cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = _header(file)
        if not header.label.serves(label):
            raise FormatError("other", "it is another object than the wanted one")
        if header.size > len(out) or (header.size < len(out) and label.kind == KV):
            raise FormatError("other", f"{header.size} bytes, but {len(out)} were expected")
        out = out[: header.size]
        view, done = out.data, 0
        while done < header.size:
            got = os.preadv(file, [view[done : done + _STEP]], header.at + done)
            if not got:
                raise FormatError("truncated", f"{done} of {header.size} bytes")
            done += got
            count(got)
    finally:
        os.close(file)
    if format.checksum(out) != header.checksum:
        raise FormatError("corrupt", "its content is not what was written")
    return header.size


def inspect(path: str) -> Header:
    """The header of an object. Raises what `read` raises."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _header(file)
    finally:
        os.close(file)


def _header(file: int) -> Header:
    head = os.pread(file, format.ALIGN, 0)
    size = format.header_size(head)
    if size > len(head):
        head += os.pread(file, size - len(head), len(head))
    return format.decode(head[:size], os.fstat(file).st_size)
