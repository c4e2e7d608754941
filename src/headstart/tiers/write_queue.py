"""Write queue: what the engine thread wants of the disk's thread, in order. The engine thread never waits here."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from headstart.interfaces.tokens import Bytes
from headstart.tiers.disk import Disk, Label
from headstart.tiers.disk.format import ALIGN
from headstart.tiers.disk.store import AT_A_TIME

BATCH = 32 << 20
"""Bytes that are written and synced together."""


@dataclass(frozen=True, slots=True)
class Offer:
    """An object on its way to the disk. `tombstone`: the number of the latest one that the engine thread obeyed."""

    label: Label
    payload: Bytes
    tombstone: int


DiskCall = Callable[[Disk | None], None]
"""What another thread waits for. It gets the disk, or None if that cannot be used."""
_Wish = Offer | frozenset[bytes] | DiskCall | None
"""What the queue has: an object to write, keys to discard, what is to be done after the writes, or None to end."""


@dataclass(frozen=True, slots=True)
class Round:
    """What the disk's thread does next: it writes a batch of objects, and then discards some, or does what was asked.

    Attributes:
        ends: whether it is the last round.
    """

    batch: list[Offer]
    discarded: frozenset[bytes] = frozenset()
    then: DiskCall | None = None
    ends: bool = False


class WriteQueue:
    """Offers, discards and questions.

    Args:
        limit: most bytes that may wait to be written.

    Attributes:
        waiting: bytes that wait.
    """

    def __init__(self, limit: int) -> None:
        self.waiting = 0  # changed by both threads, under the lock
        self._limit = limit
        self._lock = threading.Lock()
        self._queue: queue.Queue[_Wish] = queue.Queue()
        self._ahead: deque[_Wish] = deque()  # the beginning of the queue, which the thread has looked through
        self._asked: queue.SimpleQueue[DiskCall] = queue.SimpleQueue()
        self._unwanted: set[bytes] = set()  # keys of queued discards; under the lock

    # ── the engine's side ────────────────────────────────────────────────────────────────────────────────────────────

    def offer(self, one: Offer, *, last: bool = False) -> bool:
        """Queues an object. False if the queue is full. `last`: the server stops, so there is no limit."""
        with self._lock:
            if self.waiting and self.waiting + len(one.payload) > self._limit and not last:
                return False
            self.waiting += len(one.payload)
        self._queue.put(one)
        return True

    def discard(self, keys: Collection[bytes]) -> None:
        """Queues keys to discard. Objects that were offered before are not written."""
        with self._lock:
            self._unwanted.update(keys)
        self._queue.put(frozenset(keys))

    def ask(self, what: DiskCall, *, after_writes: bool) -> None:
        """Queues a question. `after_writes`: behind all that was offered until now; otherwise it is answered soon."""
        if after_writes:
            self._queue.put(what)
        else:
            self._asked.put(what)
            self.wake()

    def wake(self) -> None:
        """Lets the thread begin a round."""
        self._queue.put(frozenset())

    def end(self) -> None:
        """Lets the thread end after all that was queued until now."""
        self._queue.put(None)

    # ── the thread's side ────────────────────────────────────────────────────────────────────────────────────────────

    def collect(self, pause: Callable[[], float]) -> Round:
        """The next round. Waits for the first item, for at most the seconds that `pause` returns."""
        batch: list[Offer] = []
        size = 0
        while size < BATCH and len(batch) < AT_A_TIME:
            try:
                if self._ahead:
                    item = self._ahead.popleft()
                else:
                    item = self._queue.get_nowait() if batch else self._queue.get(timeout=pause())
            except queue.Empty:
                break
            if item is None:
                return Round(batch, ends=True)
            if isinstance(item, frozenset):
                return Round(batch, discarded=item)
            if not isinstance(item, Offer):
                return Round(batch, then=item)
            batch.append(item)
            size += len(item.payload) + ALIGN
        return Round(batch)

    def unwanted(self, batch: Collection[Offer]) -> set[bytes]:
        """The keys of a batch that were discarded after they were offered."""
        with self._lock:
            return {one.label.key for one in batch} & self._unwanted

    def discards_done(self, keys: Collection[bytes]) -> None:
        """A queued discard is over: what is offered from now on under these keys is wanted."""
        with self._lock:
            self._unwanted.difference_update(keys)

    def take_discarded(self) -> list[Offer]:
        """Takes the objects that were discarded while they wait, without waiting for those before them."""
        discarded, kept, refused = set[bytes](), list[_Wish](), list[Offer]()
        for item in reversed(self._take_all()):
            if isinstance(item, frozenset):
                discarded |= item
            if isinstance(item, Offer) and item.label.key in discarded:
                refused.append(item)
            else:
                kept.append(item)
        self._ahead.extend(reversed(kept))
        return refused[::-1]

    def answered(self, one: Offer) -> None:
        """An object is stored or refused. Its payload may change again."""
        with self._lock:
            self.waiting -= len(one.payload)

    def answer(self, disk: Disk | None) -> None:
        """Answers what was asked, apart from what is to be answered after writes."""
        while not self._asked.empty():
            self._asked.get()(disk)

    def refuse_all(self) -> None:
        """Answers everything that was asked, when the thread has ended."""
        for item in self._take_all():
            if callable(item):
                item(None)
        with suppress(queue.Empty):
            while True:
                self._asked.get_nowait()(None)

    def _take_all(self) -> list[_Wish]:
        """Takes everything out of the queue."""
        found: list[_Wish] = []
        with suppress(IndexError):
            while True:
                found.append(self._ahead.popleft())
        with suppress(queue.Empty):
            while True:
                found.append(self._queue.get_nowait())
        return found
