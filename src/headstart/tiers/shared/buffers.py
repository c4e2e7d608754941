"""Buffers: memory that objects pass through on their way from and to a store. It is used again and again, because memory that
is new to the process costs five times as much as a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from headstart.interfaces.tokens import Bytes

STEP = 1 << 16
"""Sizes of buffers are multiples of this, so that objects of about one size share them."""


class Buffers:
    """Buffers that nobody uses now. Thread-safe.

    Args:
        most: bytes that are kept while nobody uses them.

    Attributes:
        free: bytes that are kept now.
    """

    def __init__(self, most: int) -> None:
        self.free = 0
        self._most = most
        self._kept: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> Bytes:
        """A buffer of `size` bytes. It may still hold what another object left there."""
        whole = -(-size // STEP) * STEP
        with self._lock:
            kept = self._kept.get(whole)
            if kept:
                self.free -= whole
            buffer = kept.pop() if kept else np.empty(whole, np.uint8)
        return buffer[:size]

    def giver(self, buffer: Bytes) -> Callable[[], None]:
        """What gives a buffer back that `take` returned. Nobody may use the buffer then. Further calls do nothing, because
        it may belong to another object already. Without a call it is Python's garbage."""
        held = [buffer]

        def give() -> None:
            with self._lock:
                whole = held.pop().base if held else None
                if whole is not None and self.free + len(whole) <= self._most:
                    self.free += len(whole)
                    self._kept.setdefault(len(whole), []).append(whole)

        return give
