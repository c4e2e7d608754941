"""Reader: one object, read and checked. Thread-safe."""

from __future__ import annotations

import os
from collections.abc import Callable

from headstart.interfaces.tokens import Bytes
from headstart.tiers.disk import format
from headstart.tiers.disk.format import FormatError, Header, Label

_STEP = 16 << 20
"""Most bytes of one call to read."""


def read(path: str, label: Label, out: Bytes, count: Callable[[int], None]) -> int:
    """Reads exactly this object into `out`, and checks all of it; its bytes. `count` is told of each step.

    Rows must fill `out`; a checkpoint may be smaller. Where derived is asked for, canonical that took its place is as good.

    Raises:
        FileNotFoundError: it is not there (any more).
        FormatError: it must not be used; `out` is then undefined.
        OSError: it cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = _header(file)
        if not header.label.serves(label):
            raise FormatError("other", "it is another object than the one asked for")
        if header.size > len(out) or (header.size < len(out) and label.kind == "rows"):
            raise FormatError("other", f"{header.size} bytes where {len(out)} were asked for")
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
