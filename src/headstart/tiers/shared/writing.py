"""Writing: a thread that stores what the engine thread has offered, parents before children, at a limited rate.

What does not fit into the queue is refused, and offered again when a request uses it. So when the store is slower than the
engine, what is reused is stored first.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.interfaces.tokens import BlockId, Bytes
from headstart.tiers.disk import Label
from headstart.tiers.shared.envelope import seal
from headstart.tiers.shared.expiry import sweep
from headstart.tiers.shared.reading import Link
from headstart.tiers.shared.servers import EVERY, ServerCard, publish
from headstart.tiers.shared.store import StoreError
from headstart.tiers.shared.terms import SharedTerms
from headstart.units import show_size

log = logging.getLogger("headstart.shared")

RATE = 256 << 20
"""Most bytes written in a second, on average."""
BURST = 64 << 20
"""Bytes that may be written at once after a pause."""
BATCH = 32
"""Objects whose presence is asked for in one call."""
LOOK = 60.0
"""Seconds between two looks at destroyed keys and expired objects."""
GRACE = 2.0
"""Seconds for which stopping waits for a running call."""


@dataclass(frozen=True, slots=True)
class Offered:
    """An entry that waits to be stored, and the beginning of a chain that is only touched (without a payload)."""

    labels: tuple[Label, ...]
    payload: Bytes | None

    @property
    def size(self) -> int:
        return 0 if self.payload is None else len(self.payload)


class Writing:
    """The thread and its queue. All public methods are for the engine thread.

    Args:
        room: most bytes that wait.
        card: describes this server, and names it in what it seals.
        terms: how long entries may be kept, by the clock `wall`.
    """

    def __init__(self, link: Link, room: int, card: ServerCard, terms: SharedTerms, wall: Callable[[], float]) -> None:
        self._link = link
        self._room = room
        self._card = card
        self._writer = bytes.fromhex(card.writer)
        self._terms = terms
        self._wall = wall
        self._queue: deque[Offered] = deque()
        self._waiting = 0  # bytes
        self._answers: deque[BlockId] = deque()
        self._changed = threading.Condition()
        self._ends: float | None = None
        self._looked = self._swept = self._said = -math.inf
        self._allowance, self._filled = float(BURST), link.clock()
        self._thread = threading.Thread(target=self._loop, name="headstart-shared", daemon=True)
        self._thread.start()

    def offer(self, label: Label, payload: Bytes, *, last: bool) -> bool:
        link = self._link
        if label.key in link.stored or not link.breaker.closed:
            return False
        with self._changed:
            if not last and self._waiting + len(payload) > self._room:
                link.counters["skipped_full"] += 1
                return False
            link.stored.add(label.key)  # or it would be offered again while it waits
            self._waiting += len(payload)
            self._queue.append(Offered((label,), payload))
            self._changed.notify()
        return True

    def touch(self, labels: Sequence[Label]) -> None:
        with self._changed:
            self._queue.append(Offered(tuple(labels), None))
            self._changed.notify()

    def answered(self) -> list[BlockId]:
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def close(self, seconds: float) -> bool:
        with self._changed:
            self._ends = time.monotonic() + seconds
            self._changed.notify()
        self._thread.join(seconds + GRACE)
        if self._waiting:
            log.warning("stopped with %s not yet in the shared store", show_size(self._waiting))
        return not self._thread.is_alive()

    # ── the thread's side ────────────────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        while (batch := self._next()) is not None:
            try:
                self._look_after()
                if self._link.breaker.allows(self._link.clock()):
                    self._touch([label for one in batch if one.payload is None for label in one.labels])
                    self._store([(one.labels[0], one.payload) for one in batch if one.payload is not None])
                    self._link.breaker.succeeded()
                else:
                    self._refuse(batch, "failing")
            except StoreError as error:
                if error.reason == "full":
                    self._link.counters["fault_full"] += 1
                    self._refuse(batch, "store_full")
                else:
                    self._link.failed(error.reason, error)
                    self._refuse(batch, "failing")
            except Exception:  # any error: the thread must go on, or what is offered gets no answer
                log.exception("an internal error while writing to the shared store")
                self._refuse(batch, "failing")
            self._answer(batch)

    def _next(self) -> list[Offered] | None:
        """The next objects, perhaps none; None when it is time to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ends is not None, LOOK)
            if self._ends is not None and (not self._queue or time.monotonic() > self._ends):
                return None
            return [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]

    def _look_after(self) -> None:
        """Forgets destroyed keys, and deletes what has expired in a store that does not do it itself."""
        now = self._link.clock()
        if now < self._looked + LOOK:
            return
        self._looked = now
        self._link.keys.refresh()
        if now >= self._said + EVERY:
            self._said = now
            publish(self._link.store, self._link.keys, self._card)
        if now >= self._swept + self._terms.look:
            self._swept = now
            own, everybody = self._terms.by_name(), self._terms.everybody
            self._link.counters["erased"] += sweep(self._link.store, lambda owner: own.get(owner, everybody))

    def _touch(self, labels: Sequence[Label]) -> None:
        if labels:
            self._link.store.touch(list(map(self._link.name, labels)))

    def _store(self, batch: Sequence[tuple[Label, Bytes]]) -> None:
        link = self._link
        if not batch:
            return
        names = [link.name(label) for label, _ in batch]
        for (label, payload), name, there in zip(batch, names, link.store.have(names), strict=True):
            if there and label.key not in link.bad:
                link.counters["there"] += 1
                continue
            age = max(0.0, self._wall() - label.written) if label.written else 0.0
            life = self._terms.of(label.owner) - age
            if not self._in_time(len(payload)) or life <= 0:
                link.stored.drop(label.key)
                continue
            link.missing.drop(label.key)
            blob = seal(name, label, payload, link.keys.newest(label.owner), self._writer)
            if link.store.put(name, blob, age=age, life=life):
                link.bad.drop(label.key)
                link.counters["saved"] += 1
                link.counters["saved_bytes"] += len(blob)

    def _in_time(self, size: int) -> bool:
        """Waits until `size` bytes may be written. False if the server stops first."""
        now = self._link.clock()
        self._allowance = min(float(BURST), self._allowance + (now - self._filled) * RATE) - size
        self._filled = now
        pause = -self._allowance / RATE
        if pause > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._ends is not None, pause)
        return self._ends is None or time.monotonic() < self._ends

    def _refuse(self, batch: Sequence[Offered], reason: str) -> None:
        offered = [label for one in batch if one.payload is not None for label in one.labels]
        self._link.counters[f"skipped_{reason}"] += len(offered)
        for label in offered:
            self._link.stored.drop(label.key)

    def _answer(self, batch: Sequence[Offered]) -> None:
        with self._changed:
            self._waiting -= sum(one.size for one in batch)
        self._answers.extend(one.labels[0].key for one in batch if one.payload is not None)
