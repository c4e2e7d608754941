"""The contract of a shared store: names → bytes, for many servers at a time, at a place that may fail at any time.

A store holds opaque bytes. Two servers that write one name write the same content, so there are no locks and no versions: the
last writer wins, and nobody can tell. The store may lose any object at any time. It owns its room: it decides what to evict.

Every method may be called from several threads at once. Every method gives up after the store's time limit (without progress)
and raises `StoreError`. Nothing is tried twice: the caller decides (`breaker`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

Reason = Literal["timeout", "refused", "auth", "full", "closed", "other"]
"""Why a store failed: no answer in time; nobody listens, or the connection broke; wrong password or missing right; no room for
writing; the store was closed by this process; anything else."""

Blob = memoryview
"""The bytes of one object: one dimension of unsigned bytes."""

TIMEOUT = 0.25
"""Seconds that a store waits for a connection, or without progress for an answer."""
MOST = 64 << 20
"""Bytes of an object that are read, unless the caller says how many."""
SLOWEST = 1 << 20
"""Bytes a second. An answer that comes more slowly than this, beyond the time limit, counts as no progress."""
BEHIND = 1 << 16
"""Most bytes that are taken behind the middle of an object (`get_into`), where a header and a tag stand. A larger object is
cut: whoever can write to the store must not fill the memory of those who read."""
GROWS = "This store evicts nothing, so it grows without limit. Let objects expire, or let the store delete what is old."
"""A warning about stores that never evict."""


def room(size: int) -> Blob:
    """Writable memory for an object, not set to anything."""
    return np.empty(size, np.uint8).data


class StoreError(Exception):
    """The store did not do what it was asked to. The message names no key, no password and no content."""

    quotes = False

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Stored:
    """An object in a listing.

    Attributes:
        size: bytes.
        age: seconds since its text was first stored, as far as the store knows; None if it does not.
    """

    name: str
    size: int
    age: float | None


@dataclass(frozen=True, slots=True)
class Placed:
    """An object whose middle was put where it was wanted.

    Attributes:
        head: the bytes before the middle; all bytes, if the object is not longer than head and middle.
        tail: the bytes behind it.
    """

    head: Blob
    tail: Blob


class SharedStore(Protocol):
    """Names → bytes. Names are those of `names`. All methods raise StoreError.

    Attributes:
        url: where it is, without password; for messages.
        expires: whether `put` makes the store delete the object at the end of its life. Otherwise `expiry.sweep` must.
        received: grows whenever something has arrived, also in the middle of an object: whoever waits sees progress.
        at_once: objects whose presence is asked for in one round trip.
    """

    url: str
    expires: bool
    received: int = 0
    at_once: int = 128

    def get(self, names: Sequence[str], most: int = MOST) -> list[Blob | None]:
        """The objects, in order; None for those that are not there. One round trip where the store can.

        Args:
            most: bytes of each object that are kept at most.
        """

    def get_into(self, wanted: Sequence[tuple[str, Blob]], at: int) -> list[Placed | None]:
        """Like `get`, but the bytes of each object from `at` on are written into its buffer, until that is full, and of those
        behind it at most `BEHIND` are kept.

        Args:
            wanted: names with buffers. What is in a buffer after an error, or if the object is missing, is undefined.
        """
        most = max((at + len(out) + BEHIND for _, out in wanted), default=0)
        blobs = self.get([name for name, _ in wanted], most)
        return [None if blob is None else _placed(blob, out, at) for blob, (_, out) in zip(blobs, wanted, strict=True)]

    def have(self, names: Sequence[str]) -> list[bool]:
        """Whether the objects are there. A promise for no moment: they may be evicted at once."""

    def put(self, name: str, data: Blob, *, age: float = 0.0, life: float = math.inf) -> bool:
        """Stores an object whole or not at all, and replaces what is there.

        Args:
            age: seconds since its text was first stored anywhere.
            life: seconds for which it may be kept from now.

        Returns:
            False if the store cannot keep to `life`; the object is then not stored.
        """

    def put_new(self, name: str, data: Blob, *, age: float = 0.0, life: float = math.inf) -> bool:
        """Like `put`, but leaves what is there. Returns whether the object was written."""

    def touch(self, names: Sequence[str]) -> None:
        """Says that objects are in use, so that the store evicts others first. Their age does not change."""

    def limit(self, lives: Sequence[tuple[str, float]]) -> None:
        """Shortens the lives of objects that are there: no seconds or less delete them, and no life becomes longer.

        For stores with `expires`; others do nothing.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects, if they are there."""

    def clean(self, prefix: str = "") -> None:
        """Deletes what is left of interrupted writes of objects whose names begin with `prefix`; writes that run fail."""

    def objects(self, prefix: str = "") -> Iterator[Stored]:
        """All objects whose names begin with `prefix`. For people and sweeps: it takes longer as more is stored."""

    def warnings(self, term: float = math.inf) -> list[str]:
        """What should be set otherwise in the store, with the remedy.

        Args:
            term: seconds after which headstart lets objects expire.
        """

    def close(self) -> None:
        """Closes all connections. Calls in other threads fail."""


def _placed(blob: Blob, out: Blob, at: int) -> Placed:
    end = at + len(out)
    if len(blob) <= end:
        return Placed(blob, memoryview(b""))
    out[:] = blob[at:end]
    return Placed(blob[:at], blob[end : end + BEHIND])
