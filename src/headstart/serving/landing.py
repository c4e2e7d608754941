"""Landing: what was fetched is copied into its cell on a thread of its own, because the engine thread has replies to decode.

The engine thread chooses the cell before, and publishes the entry after. Memory that was never used makes a copy ten times as
slow, and this thread waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.entry import Entry
from headstart.tiers.memory import Cell
from headstart.tiers.shared_tier import Arrival

SMALL = 1 << 16
"""Bytes up to which a copy takes less time than another thread needs to begin it."""
ALOFT = 32 << 20
"""Bytes that are being copied, above which a prompt takes in no more."""


@dataclass(frozen=True, slots=True)
class Landing:
    """An object on its way into a cell, which is allocated and not yet published."""

    entry: Entry
    cell: Cell
    arrival: Arrival
    copied: Future[None]


class Landings:
    """The objects of one prompt that are being copied, in their order.

    Attributes:
        size: their bytes.
    """

    def __init__(self) -> None:
        self.size = 0
        self._aloft: deque[Landing] = deque()

    def __len__(self) -> int:
        return len(self._aloft)

    @property
    def crowded(self) -> bool:
        return self.size > ALOFT

    def add(self, landing: Landing) -> None:
        self._aloft.append(landing)
        self.size += len(landing.arrival.payload)

    def landed(self, *, wait: bool = False) -> Iterator[Landing]:
        """Those that are copied, parents before children. `wait`: all."""
        while self._aloft and (wait or self._aloft[0].copied.done()):
            landing = self._aloft.popleft()
            self.size -= len(landing.arrival.payload)
            landing.copied.result()
            yield landing


class Copier:
    """The thread that copies. It starts with the first copy.

    Args:
        wake: called on the thread when a copy is made.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headstart-shared-copy")

    def copy(self, payload: Bytes, into: Bytes) -> Future[None]:
        """Copies in the order of the calls. Neither must change meanwhile."""
        if len(payload) > SMALL:
            return self._thread.submit(self._copy, payload, into)
        done: Future[None] = Future()
        into[: len(payload)] = payload
        done.set_result(None)
        return done

    def _copy(self, payload: Bytes, into: Bytes) -> None:
        into[: len(payload)] = payload
        self._wake()

    def close(self) -> None:
        self._thread.shutdown()
