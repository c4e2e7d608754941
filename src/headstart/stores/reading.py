"""Reading: several objects at the same time, from a disk that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

from headstart.stores.base import Bytes
from headstart.stores.disk import Label

READERS = 4
"""Objects that are read at the same time."""
STUCK = 10.0
"""Seconds without any progress after which reading is given up: the disk hangs."""


class Hung(Exception):
    """The disk has not answered in time, and may still write into the buffer that it was given.

    Attributes:
        over: is set when it will not any more.
    """

    def __init__(self, over: threading.Event) -> None:
        super().__init__(f"the disk has not answered for {STUCK:g} s")
        self.over = over


class Reading:
    """Several threads read objects; whoever waits for them may give up."""

    def __init__(self, read: Callable[[tuple[Label, Bytes]], int | Exception], wanted: Sequence[tuple[Label, Bytes]]) -> None:
        self._read = read
        self._wanted = wanted
        self._left = iter(range(len(wanted)))  # shared: each reader takes the next one (a future for each would cost as much)
        self._lock = threading.Lock()
        self._begun: dict[int, threading.Event] = {}
        self._results: dict[int, int | Exception] = {}
        self._given_up = False

    def _take(self) -> None:
        over = threading.Event()
        try:
            for number in self._left:
                with self._lock:
                    if self._given_up:
                        return
                    self._begun[number] = over
                result = self._read(self._wanted[number])
                with self._lock:
                    self._results[number] = result
        finally:
            over.set()

    def run(self, pool: ThreadPoolExecutor) -> tuple[list[int | Exception], list[threading.Event]]:
        """The results, and what is set when the buffers of those that are `Hung` are not written into any more."""
        readers: list[Future[None]] = []
        with suppress(RuntimeError):  # no thread is to be had
            readers += (pool.submit(self._take) for _ in range(min(READERS, len(self._wanted))))
        if not readers:
            self._take()
        progress = 0
        while wait(readers, STUCK).not_done and len(self._results) > progress:
            progress = len(self._results)
        with self._lock:
            self._given_up = True
            hung = {number: over for number, over in self._begun.items() if number not in self._results}
            late = {number: Hung(hung[number]) if number in hung else TimeoutError() for number in range(len(self._wanted))}
            return list((late | self._results).values()), list(hung.values())
