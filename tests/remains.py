"""Searches for remains of a text: in all reachable objects, and in the files of a folder."""

from __future__ import annotations

import array
import gc
import sys
import types
from collections.abc import Collection
from pathlib import Path

import numpy as np

from headstart.interfaces.tokens import as_tokens

DAY = 86_400.0
START = 1.7e9


class Clock:
    """A clock that a test sets, in seconds since 1970."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def mark(number: int) -> str:
    """Four characters that do not occur by chance."""
    return f"#{number:02}~"


def marked(number: int) -> str:
    """A text that contains the mark at each offset that is possible in a block of eight."""
    return f"{mark(number)} " * 8


def kept(root: object, marks: list[str], ids: Collection[bytes] = ()) -> set[str | bytes]:
    """The marks and block ids that are in any reachable object, as text or as tokens (the fake model's tokens are bytes)."""
    whole = {id(vars(module)) for module in list(sys.modules.values()) if module is not None}
    seen, queue, found = {id(root)}, [root], set[str | bytes]()
    as_int32 = {mark: as_tokens(list(mark.encode())).tobytes() for mark in marks}
    while queue:
        one = queue.pop()
        data = b""
        if isinstance(one, str):
            found.update(mark for mark in marks if mark in one)
        elif isinstance(one, bytes | bytearray):
            data = bytes(one)
            found.update({data}.intersection(ids))
        elif isinstance(one, np.ndarray) and one.dtype == np.int32:
            data = np.ascontiguousarray(one).tobytes()
        elif isinstance(one, array.array):
            data = one.tobytes()
        elif isinstance(one, list | tuple) and len(one) > 8 and all(isinstance(number, int) for number in one):
            data = b"".join((number & 0xFFFFFFFF).to_bytes(4, "little") for number in one)
        if data:
            found.update(mark for mark in marks if mark.encode() in data or as_int32[mark] in data)
        if isinstance(one, type | types.ModuleType | types.FrameType):
            continue
        for other in gc.get_referents(one):
            if id(other) not in seen and id(other) not in whole:
                seen.add(id(other))
                queue.append(other)
    return found


def stored(folder: Path, marks: list[str]) -> set[str]:
    """The marks that are in a folder's files, as text, as tokens in a row of the catalogue, or as JSON in an object."""
    found: set[str] = set()
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        for one in marks:
            numbers = list(one.encode())
            forms = one.encode(), as_tokens(numbers).tobytes(), ",".join(map(str, numbers)).encode()
            found.update(one for form in forms if form in data)
    return found
