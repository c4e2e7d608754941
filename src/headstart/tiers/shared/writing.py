"""Writing: a thread that stores what the engine thread has offered, parents before children, at a limited rate.

What does not fit into the queue is refused, and offered again when a request uses it. So when the store is slower than the
engine, what is reused is stored first. What follows a refused entry on its chain is refused too: without it, it could not be
used.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from headstart.errors import Unavailable
from headstart.interfaces.tokens import BlockId, Bytes
from headstart.tiers.disk import Label, Note
from headstart.tiers.shared.data_keys import UnusableKey
from headstart.tiers.shared.envelope import seal, seal_note
from headstart.tiers.shared.expiry import shorten, sweep
from headstart.tiers.shared.keys import SealKey
from headstart.tiers.shared.reading import Link
from headstart.tiers.shared.recent import Recent
from headstart.tiers.shared.servers import EVERY, ServerCard, publish
from headstart.tiers.shared.store import Blob, StoreError, room
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
REFUSED = 3600.0
"""Seconds for which a refused entry keeps those that follow it out of the store."""
NOTES = 4096
"""Entries in the queue above which notes are refused."""
GRACE = 2.0
"""Seconds for which stopping waits for a running call."""
SLACK = 1 << 12
"""Bytes by which objects of one kind differ at most, because of their headers. More costs only new memory."""


@dataclass(frozen=True, slots=True)
class Offered:
    """What waits for the thread: an entry; the beginning of a chain that is only touched (without a payload); a note with its
    owner; or entries that must be deleted, with who waits for that.

    `insists`: if they cannot be deleted, that is tried again.
    """

    labels: tuple[Label, ...] = ()
    payload: Bytes | None = None
    note: tuple[bytes, Note] | None = None
    erased: Future[None] | None = None
    insists: bool = False

    @property
    def size(self) -> int:
        return 0 if self.payload is None else len(self.payload)


class Writing:
    """The thread and its queue. All public methods are for the engine thread.

    Args:
        room: most bytes that wait.
        card: describes this server, and names it in what it seals.
        terms: how long entries may be kept, by the clock `wall`.
        share: most bytes that are written for each byte that is computed, before the server stops.
        writes: whether this server writes and deletes at all. If not, the thread only looks after the keys.
    """

    def __init__(
        self,
        link: Link,
        room: int,
        card: ServerCard,
        terms: SharedTerms,
        wall: Callable[[], float],
        share: float = math.inf,
        *,
        writes: bool = True,
    ) -> None:
        self._link = link
        self._writes = writes
        self._room = room
        self._card = card
        self._writer = bytes.fromhex(card.writer)
        self._terms = terms
        self._wall = wall
        self._queue: deque[Offered] = deque()
        self._waiting = 0  # bytes
        self._share, self._earned = share, 0.0  # bytes that may be written
        self._refused = Recent(REFUSED, link.clock)
        self._keyless = Recent(LOOK, link.clock)  # owners whose key cannot be used
        self._answers: deque[BlockId] = deque()
        self._changed = threading.Condition()
        self._ends: float | None = None
        self._looked = self._swept = self._said = -math.inf
        self._known_terms: tuple[dict[str, float], float] | None = None  # that hold for all that the store has, or soon
        self._again: list[Offered] = []  # deletions that have failed
        self._shortening: Iterator[None] | None = None  # what is left to do for them
        self._allowance, self._filled = float(BURST), link.clock()
        self._sealed: Blob = memoryview(b"")  # memory for sealing
        self._thread = threading.Thread(target=self._loop, name="headstart-shared", daemon=True)
        self._thread.start()

    def offer(self, label: Label, payload: Bytes, *, last: bool) -> bool:
        link = self._link
        if label.key in link.stored:
            return False
        if (reason := self._reason(label, len(payload), last=last)) is not None:
            link.counters[f"skipped_{reason}"] += 1
            self._refused.add(label.key)
            return False
        self._refused.drop(label.key)
        if self._share < math.inf and not last:
            self._earned -= len(payload)
        with self._changed:
            link.stored.add(label.key)  # or it would be offered again while it waits
            self._waiting += len(payload)
            self._queue.append(Offered((label,), payload))
            self._changed.notify()
        return True

    def _reason(self, label: Label, size: int, *, last: bool) -> str | None:
        """Why an entry is refused; None if it is not."""
        if not self._link.breaker.closed:
            return "failing"
        if label.parent in self._refused:
            return "parent"
        if not last and self._share < math.inf and self._earned < size:
            return "share"
        if not last and not self.takes(size):
            return "full"
        return None

    def takes(self, size: int) -> bool:
        return not self._waiting or self._waiting + size <= self._room

    def computed(self, size: int) -> None:
        """So many bytes of canonical entries were computed."""
        if self._share < math.inf:
            self._earned += self._share * size

    def touch(self, labels: Sequence[Label]) -> None:
        with self._changed:
            self._queue.append(Offered(tuple(labels), None))
            self._changed.notify()

    def note(self, owner: bytes, note: Note) -> None:
        if not self._link.breaker.closed or len(self._queue) > NOTES:
            self._link.counters["skipped_note"] += 1
            return
        with self._changed:
            self._queue.append(Offered(note=(owner, note)))
            self._changed.notify()

    def erase(self, labels: Sequence[Label]) -> Future[None]:
        done: Future[None] = Future()
        if not (self._writes and labels):
            done.set_result(None)
            return done
        with self._changed:
            if self._ends is None:
                self._queue.append(Offered(tuple(labels), erased=done))
                self._changed.notify()
            else:
                done.set_exception(Unavailable("The server is stopping."))
        return done

    def discard(self, labels: Sequence[Label]) -> None:
        """Deletes entries whose content is wrong, after what was offered. It is tried until it succeeds."""
        if self._writes:
            with self._changed:
                self._queue.append(Offered(tuple(labels), erased=Future(), insists=True))
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
                if batch and not self._link.breaker.allows(self._link.clock()):
                    self._refuse(batch, "failing")
                elif batch:
                    self._touch([label for one in batch if one.payload is None and one.erased is None for label in one.labels])
                    self._write_notes([one.note for one in batch if one.note is not None])
                    self._store([(one.labels[0], one.payload) for one in batch if one.payload is not None])
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
            self._answer(batch)  # first: who waits for a deletion takes them too
            self._erase(batch)
            try:
                self._look_after()
                self._shorten()
            except StoreError as error:
                self._link.failed(error.reason, error)
            except Exception:
                log.exception("an internal error while looking after the shared store")
        for one in self._queue:
            if one.erased is not None:
                one.erased.set_exception(Unavailable("The server is stopping."))

    def _next(self) -> list[Offered] | None:
        """The next objects, perhaps none; None when it is time to stop."""
        busy = (self._looked == -math.inf or self._shortening is not None) and self._link.breaker.closed
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ends is not None, 0.0 if busy else LOOK)
            if self._ends is not None and (not self._queue or time.monotonic() > self._ends):
                return None
            return [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]

    def _look_after(self) -> None:
        """Forgets destroyed keys, and deletes what has expired, or has the store do it."""
        now = self._link.clock()
        if now < self._looked + LOOK or not self._link.breaker.closed:
            return
        self._looked = now
        with self._changed:
            self._queue.extend(self._again)
            self._again.clear()
        self._link.keys.refresh(writes=self._writes)
        if not self._writes:
            return
        if now >= self._said + EVERY:
            self._said = now
            publish(self._link.store, self._link.keys, self._card)
            self._link.breaker.succeeded()
        if now >= self._swept + self._terms.look:
            self._swept = now
            own, everybody = self._terms.by_name(), self._terms.everybody
            self._link.counters["erased"] += sweep(self._link.store, lambda owner: own.get(owner, everybody))
            if (own, everybody) != self._known_terms:
                self._shortening = shorten(self._link.store, lambda owner: own.get(owner, everybody))
                self._known_terms = own, everybody

    def _shorten(self) -> None:
        """Does a piece of what new terms ask for: the store may be large, and others wait for this thread."""
        if self._shortening is None or not self._link.breaker.closed:
            return
        try:
            if next(self._shortening, self) is self:
                self._shortening = None
        except BaseException:  # it begins anew
            self._shortening = self._known_terms = None
            raise

    def _touch(self, labels: Sequence[Label]) -> None:
        if not labels:
            return
        names = list(map(self._link.name, labels))
        self._link.store.touch(names)
        self._link.breaker.succeeded()
        self._limit(labels)
        if not all(self._link.store.have(names)):  # evicted, or everything is gone: it is stored again when it is used again
            self._link.stored.clear()

    def _store(self, batch: Sequence[tuple[Label, Bytes]]) -> None:
        link = self._link
        if not batch:
            return
        names = [link.name(label) for label, _ in batch]
        found = link.store.have(names)
        link.breaker.succeeded()
        self._limit([label for (label, _), there in zip(batch, found, strict=True) if there])
        for (label, payload), name, there in zip(batch, names, found, strict=True):
            if there and label.key not in link.bad:
                link.counters["there"] += 1
                continue
            age, life = self._age(label), self._life(label)
            if life <= 0 or label.parent in self._refused:
                self._skip([label], "late" if life <= 0 else "parent")
                continue
            if not self._in_time(len(payload)):
                link.stored.drop(label.key)
                continue
            if (key := self._key(label.owner)) is None:
                self._skip([label], "key")
                continue
            link.missing.drop(label.key)
            blob = seal(name, label, payload, key, self._writer, self._memory)
            if self._put(name, blob, age, life):
                link.bad.drop(label.key)
                link.counters["saved"] += 1
                link.counters["saved_bytes"] += len(blob)
            else:
                self._skip([label], "late")

    def _key(self, owner: bytes) -> SealKey | None:
        """The key that seals an owner's objects. None if it cannot be used: that must not keep out the objects of others."""
        if owner in self._keyless:
            return None
        try:
            return self._link.keys.newest(owner)
        except UnusableKey as error:
            self._keyless.add(owner)
            log.warning("nothing of one owner is stored: %s", error)
            return None

    def _limit(self, labels: Sequence[Label]) -> None:
        """What is there may be from a time when its term was longer, or from a server that has none."""
        lives = [(label, life) for label in labels if (life := self._life(label)) < math.inf]
        if lives:
            self._link.store.limit([(self._link.name(label), life) for label, life in lives])
        for label, life in lives:
            if life <= 0:
                self._link.stored.drop(label.key)

    def _age(self, label: Label) -> float:
        return max(0.0, self._wall() - label.written) if label.written else 0.0

    def _life(self, label: Label) -> float:
        """Seconds for which an entry may be kept from now."""
        return self._terms.of(label.owner) - self._age(label)

    def _memory(self, size: int) -> Blob:
        """Memory for the next object, which has been used before: new memory costs more than sealing."""
        if size > len(self._sealed):
            self._sealed = room(size + SLACK)
        return self._sealed[:size]

    def _put(self, name: str, blob: Blob, age: float, life: float) -> bool:
        try:
            return self._link.store.put(name, blob, age=age, life=life)
        except BaseException:
            self._sealed = memoryview(b"")  # a call that hangs may still read it
            raise

    def _erase(self, batch: Sequence[Offered]) -> None:
        """Deletes what must be deleted, also while the store is left alone: somebody waits for it."""
        link = self._link
        for one in batch:
            if one.erased is None:
                continue
            try:
                link.store.delete([link.name(label) for label in one.labels])
                for label in one.labels:
                    link.stored.drop(label.key)
                link.counters["erased"] += len(one.labels)
                one.erased.set_result(None)
            except Exception as error:
                if isinstance(error, StoreError):
                    link.failed(error.reason, error)
                if one.insists:
                    self._again.append(replace(one, erased=Future()))
                one.erased.set_exception(Unavailable("The shared store did not answer."))

    def _write_notes(self, notes: Sequence[tuple[bytes, Note]]) -> None:
        link = self._link
        for owner, note in notes:
            name, life = link.keys.names.of(owner, "note", note.key), self._terms.of(owner)
            if not note.value:
                link.store.delete([name])
            elif life > 0 and (key := self._key(owner)) is not None:
                link.store.put(name, seal_note(name, note, key, self._writer), life=life)
                link.counters["notes_saved"] += 1
            elif life > 0:
                link.counters["skipped_note"] += 1
            link.breaker.succeeded()

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
        self._skip([label for one in batch if one.payload is not None for label in one.labels], reason)
        self._link.counters["skipped_note"] += sum(one.note is not None for one in batch)

    def _skip(self, labels: Sequence[Label], reason: str) -> None:
        self._link.counters[f"skipped_{reason}"] += len(labels)
        for label in labels:
            self._link.stored.drop(label.key)
            self._refused.add(label.key)

    def _answer(self, batch: Sequence[Offered]) -> None:
        with self._changed:
            self._waiting -= sum(one.size for one in batch)
        self._answers.extend(one.labels[0].key for one in batch if one.payload is not None)
