"""Parallel read: reads several objects at the same time, from a disk that may hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from headstart.interfaces.tokens import Bytes
from headstart.tiers.disk import Label

READERS = 4
"""Objects that are read at the same time."""
STUCK = 10.0
"""Seconds without any progress after which the disk counts as hung."""
SLOWEST = 8 << 20
"""Bytes per second of the slowest disk that is waited for. Computing is about as fast on a CPU: 8 MiB are the KV of 64 tokens
of an 8B model, or of 360 tokens of the demo model.
"""


class Hung(Exception):
    """The disk did not answer in time. It may still write into the buffer.

    Attributes:
        over: is set when it no longer writes into the buffer.
    """

    def __init__(self, over: threading.Event) -> None:
        super().__init__("the disk did not answer in time")
        self.over = over


class ParallelRead:
    """Several threads read objects. The caller stops waiting if the disk hangs: if no bytes come for `STUCK` seconds, or if all
    takes `STUCK` seconds longer than at `SLOWEST`.

    The threads are daemons (those of a pool are not), because a hanging read must not keep the process from ending.

    Args:
        moved: returns the bytes that all reads have read so far.
    """

    def __init__(
        self,
        read: Callable[[tuple[Label, Bytes]], int | Exception],
        wanted: Sequence[tuple[Label, Bytes]],
        moved: Callable[[], int],
    ) -> None:
        self._read = read
        self._wanted = wanted
        self._moved = moved
        self._left = iter(range(len(wanted)))  # shared: each reader takes the next one
        self._lock = threading.Lock()
        self._begun: dict[int, threading.Event] = {}
        self._results: dict[int, int | Exception] = {}
        self._complete = threading.Event()
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
                    if len(self._results) == len(self._wanted):
                        self._complete.set()
        finally:
            over.set()

    def run(self) -> tuple[list[int | Exception], list[threading.Event]]:
        """The results, and for each hung read an event that is set when its buffer is no longer written."""
        started = 0
        with suppress(RuntimeError):  # no thread can be started
            for _ in range(min(READERS, len(self._wanted))):
                threading.Thread(target=self._take, name="headstart-read", daemon=True).start()
                started += 1
        if not started:
            self._take()
        self._wait()
        with self._lock:
            self._given_up = True
            hung = {number: over for number, over in self._begun.items() if number not in self._results}
            late = {number: Hung(hung[number]) if number in hung else TimeoutError() for number in range(len(self._wanted))}
            return list((late | self._results).values()), list(hung.values())

    def _wait(self) -> None:
        """Returns when all is read, or when the disk counts as hung."""
        moved, now = self._moved(), time.monotonic()
        end = now + STUCK + sum(out.nbytes for _, out in self._wanted) / SLOWEST
        stuck = now + STUCK
        while len(self._results) < len(self._wanted) and now < min(stuck, end) and not self._complete.wait(STUCK / 10):
            now = time.monotonic()
            if self._moved() > moved:
                moved, stuck = self._moved(), now + STUCK
