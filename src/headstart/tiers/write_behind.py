"""Write-behind: a thread between the engine and the disk. The engine offers objects and continues; it never waits for a write.

The thread reports results as notices (`notices`): objects that were stored or refused, and new objects of other processes.
After an error, the disk is not used for a while and then tried again. Meanwhile all objects are refused, and requests are
served from memory.
"""

from __future__ import annotations

import errno
import logging
import math
import queue
import sqlite3
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from headstart.errors import Unavailable
from headstart.interfaces.tokens import Bytes
from headstart.names import OptionText, option
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.tiers.disk import Disk, FormatError, Label, Note
from headstart.tiers.disk.format import ALIGN
from headstart.tiers.disk.schema import damages
from headstart.tiers.disk.store import RESERVE
from headstart.tiers.notices import (
    EverythingErased,
    NoteFound,
    Notice,
    ObjectErased,
    ObjectFound,
    ObjectGone,
    ObjectRefused,
    ObjectStored,
    PinsFound,
)
from headstart.tiers.parallel_read import ParallelRead
from headstart.units import count, show_size

log = logging.getLogger("headstart.disk")

T = TypeVar("T")

BATCH = 32 << 20
"""Bytes that are written and synced together."""
POLL = 0.25
"""Seconds between two searches for objects of other processes."""
PATIENCE = 10.0
"""Seconds for which a disk is not used after an error."""
NEWS = 1 << 16
"""Most uses, replies and notes that wait while the disk is busy."""
SOME = 1000
"""Most notices that one call returns: the engine thread has other work."""
GRACE = 5.0
"""Seconds for which stopping waits for a running write."""
TIDY = 600.0
"""Seconds between two searches for files that crashes of other processes have left."""
KEEP = 60.0
"""Seconds for which objects that a request waits for are not evicted."""
LOG_EVERY = 60.0
"""Seconds between two log lines about refused objects."""


class WriteBehind:
    """A `DiskTier` behind a thread. All methods are for the engine thread.

    Args:
        opens: opens the disk. If it fails, it is tried again later.
        fingerprint: the fingerprint of the objects that are of interest.
        limit: most bytes that may wait to be written.
        terms: how long entries may be kept. It learns the terms that the folder knows, and when a user deleted everything.
        clock: a clock in seconds since 1970.
    """

    name = "disk"

    def __init__(
        self,
        opens: Callable[[], Disk],
        fingerprint: bytes,
        limit: int,
        terms: Terms | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._terms = Terms() if terms is None else terms
        self._terms.share()
        self._clock = clock
        self._looked, self._terms_seen = -math.inf, -1  # when expired objects were last looked for
        self._wiped: tuple[float, int] | None = None  # `Ages.wiped` at the last look
        self._wiped_first = 0.0  # its time at the first look
        self._opens = opens
        self._fingerprint = fingerprint
        self._limit = limit
        self._waiting = 0  # bytes; changed by both threads, under the lock
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[Label, Bytes] | frozenset[bytes] | None] = queue.Queue()
        self._asked: queue.SimpleQueue[Callable[[Disk | None], None]] = queue.SimpleQueue()
        self._unwanted: set[bytes] = set()  # keys of queued discards; under the lock
        self._to_delete: set[bytes] = set()  # keys to delete next; only for the thread
        self._notices: deque[Notice] = deque()
        self._uses: deque[tuple[bytes, float]] = deque(maxlen=NEWS)
        self._replies: deque[tuple[bytes, RequestTraits]] = deque(maxlen=NEWS)
        self._notes: deque[Note] = deque(maxlen=NEWS)
        self._bad: deque[bytes] = deque()
        self._reading: frozenset[bytes] = frozenset()
        self._kept: tuple[frozenset[bytes], float] = frozenset(), 0.0  # and the end of their protection
        self._hung: list[threading.Event] = []
        self._moved, self._again = 0, False  # bytes that were read; whether all objects must be reported again
        self._logged = (0, 0)  # the counters at the last log line
        self._logged_at = self._tidied = float("-inf")
        self._seen = self._seen_notes = 0
        self._known: set[bytes] = set()
        self._pinned: frozenset[bytes] = frozenset()
        self._version: tuple[int, ...] = ()
        self._sizes = (0, 0, 0, 0)
        self._foreign: Mapping[bytes, Set[bytes]] = {}
        self._ends = float("inf")
        self._failing_until = 0.0
        self._disk: Disk | None = None
        self._open()
        self._thread = threading.Thread(target=self._loop, name="headstart-disk", daemon=True)
        self._thread.start()

    @property
    def on(self) -> bool:
        return True

    @property
    def used(self) -> int:
        return self._sizes[0]

    @property
    def budget(self) -> int:
        return self._sizes[1]

    @property
    def reserved(self) -> int:
        return self._sizes[2]

    def __len__(self) -> int:
        return self._sizes[3]

    # ── the engine's side ────────────────────────────────────────────────────────────────────────────────────────────

    def offer(self, label: Label, payload: Bytes, *, last: bool = False) -> bool:
        if time.monotonic() < self._failing_until:
            return False
        with self._lock:
            if self._waiting and self._waiting + len(payload) > self._limit and not last:
                self.counters["skipped_full"] += 1
                return False
            self._waiting += len(payload)
        self._queue.put((label, payload))
        return True

    def discard(self, keys: Collection[bytes]) -> None:
        with self._lock:
            self._unwanted.update(keys)
        self._queue.put(frozenset(keys))

    def pin(self, keys: Collection[bytes]) -> Future[bool]:
        def pin(disk: Disk) -> bool:
            fits = disk.pin(keys)
            self._look_at_pins(disk)
            return fits

        return self._ask(pin)

    def unpin(self, keys: Collection[bytes]) -> Future[None]:
        def unpin(disk: Disk) -> None:
            disk.catalog.pin(keys, False)
            self._look_at_pins(disk)

        return self._ask(unpin)

    def erase(self, keys: Collection[bytes]) -> Future[int]:
        def erase(disk: Disk) -> int:
            gone = disk.erase(keys)
            self._forget([row.label.key for row in gone], ObjectErased)
            return sum(row.allocated for row in gone)

        return self._ask(erase)

    def _ask(self, work: Callable[[Disk], T]) -> Future[T]:
        """Lets the thread do something soon. The future raises Unavailable if the disk cannot be used."""
        done: Future[T] = Future()

        def answer(disk: Disk | None) -> None:
            unusable = Unavailable("The disk cannot be used now; the server's log says why.", retry_after=PATIENCE)
            if disk is None:
                done.set_exception(unusable)
                return
            try:
                done.set_result(work(disk))
            except Exception:
                done.set_exception(unusable)
                raise

        self._asked.put(answer)
        self._queue.put(frozenset())  # wakes the thread
        return done

    def read(self, wanted: Sequence[tuple[Label, Bytes]]) -> list[int | Exception]:
        if self._hangs:
            return [TimeoutError("the disk still does not answer") for _ in wanted]
        self._reading = frozenset(label.key for label, _ in wanted)
        results, self._hung = ParallelRead(self._read, wanted, lambda: self._moved).run()
        self._reading = frozenset()
        if self._hung:
            log.warning("the disk hangs: nothing is read until it answers")
            self.counters["fault_hung"] += 1
            self._again = True
        return results

    @property
    def _hangs(self) -> bool:
        return not all(over.is_set() for over in self._hung)

    def _read(self, wanted: tuple[Label, Bytes]) -> int | Exception:
        disk, (label, out) = self._disk, wanted
        try:
            if disk is None:
                raise FileNotFoundError("the disk is not there")
            return disk.read_into(label, out, self._count)
        except FileNotFoundError as error:
            self.counters["fault_missing"] += 1
            return error
        except FormatError as error:
            self.counters[f"fault_{error.reason}"] += 1
            return self._put_aside(label, error)
        except Exception as error:
            self.counters["fault_read"] += 1
            return self._put_aside(label, error)

    def _count(self, moved: int) -> None:
        self._moved += moved  # several threads do this, so it may be inexact. It only has to grow

    def _put_aside(self, label: Label, error: Exception) -> Exception:
        log.warning("object %s goes into quarantine: %s", label.key.hex()[:16], error)
        self._bad.append(label.key)
        return error

    def keep(self, keys: Collection[bytes]) -> None:
        self._kept = frozenset(keys), time.monotonic() + KEEP

    def _spared(self) -> frozenset[bytes]:
        kept, until = self._kept
        return self._reading | kept if time.monotonic() < until else self._reading

    def use(self, keys: Collection[bytes]) -> None:
        now = time.time()
        self._uses.extend((key, now) for key in keys)

    def replied(self, keys: Collection[bytes], request_traits: RequestTraits) -> None:
        self._replies.extend((key, request_traits) for key in keys)

    def note(self, note: Note) -> None:
        self._notes.append(note)

    def foreign(self) -> Mapping[bytes, Set[bytes]]:
        return self._foreign

    def notices(self) -> list[Notice]:
        return [self._notices.popleft() for _ in range(min(len(self._notices), SOME))]

    def close(self, seconds: float) -> bool:
        self._ends = time.monotonic() + seconds
        self._queue.put(None)
        self._thread.join(seconds + GRACE)
        if self._waiting:
            log.warning("stopped with %s not yet on disk; give more %s", show_size(self._waiting), OptionText(option("drain")))
        return not (self._thread.is_alive() or self._hangs)

    # ── the thread's side ────────────────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        closing = False
        while not closing and time.monotonic() < self._ends:
            batch, discarded, closing = self._collect()
            self._work(self._wanted(batch))
            self._to_delete |= discarded
            with self._lock:
                self._unwanted -= discarded
        while not self._asked.empty():
            self._asked.get()(None)
        if self._disk is not None:
            _close(self._disk)

    def _collect(self) -> tuple[list[tuple[Label, Bytes]], frozenset[bytes], bool]:
        """A batch of offered objects, keys to discard after it, and whether to stop. Waits a short time for the first item."""
        batch: list[tuple[Label, Bytes]] = []
        size = 0
        while size < BATCH:
            try:
                item = self._queue.get_nowait() if batch else self._queue.get(timeout=POLL)
            except queue.Empty:
                break
            if item is None:
                return batch, frozenset(), True
            if isinstance(item, frozenset):
                return batch, item, False
            batch.append(item)
            size += len(item[1]) + ALIGN
        return batch, frozenset(), False

    def _wanted(self, batch: list[tuple[Label, Bytes]]) -> list[tuple[Label, Bytes]]:
        """The objects of a batch, without those that were discarded after they were offered."""
        with self._lock:
            unwanted = {label.key for label, _ in batch} & self._unwanted
        for label, payload in batch:
            if label.key in unwanted:
                self._end(ObjectRefused(label, "discarded"), payload)
        return [(label, payload) for label, payload in batch if label.key not in unwanted]

    def _work(self, batch: list[tuple[Label, Bytes]]) -> None:
        """One round of work. An error of the disk ends it and refuses the batch."""
        reason = "failing"
        try:
            if time.monotonic() >= self._failing_until and (self._disk is not None or self._open()):
                disk = self._disk
                assert disk is not None
                if time.monotonic() >= self._tidied + min(TIDY, self._terms.look):
                    self._reconcile(disk)
                while self._bad:  # before it is written again
                    row = disk.quarantine(self._bad.popleft())
                    if row is not None:
                        self._notices.append(ObjectFound(row.label))
                self._expire(disk)
                while not self._asked.empty():
                    self._asked.get()(disk)
                if self._to_delete:
                    gone = disk.discard(self._to_delete)
                    self._to_delete.clear()
                    self.counters["discarded"] += len(gone)
                    self._forget(gone)
                if batch:
                    offered, batch = batch, []
                    try:
                        self._write(disk, offered)
                    except BaseException:
                        batch = offered
                        raise
                    if self._failing_until:
                        log.warning("the disk works again")
                        self._failing_until = 0.0
                self._housekeep(disk)
        except Exception as error:  # any error: the thread must go on, or offered objects get no answer
            self._fail(error)
            reason = "fault"
        while (self._disk is None or time.monotonic() < self._failing_until) and not self._asked.empty():
            self._asked.get()(None)
        for label, payload in batch:
            self._end(ObjectRefused(label, reason), payload)
        self._log_refused()

    def _log_refused(self) -> None:
        """Logs from time to time how many objects were refused."""
        refused = self.counters["skipped_full"], self.counters["skipped_budget"]
        if refused != self._logged and time.monotonic() >= self._logged_at + LOG_EVERY:
            full, budget = (now - before for now, before in zip(refused, self._logged, strict=True))
            text = f"{count(full, 'object')} wait until the disk has time, {count(budget, 'object')} not stored"
            log.log(logging.WARNING if budget else logging.INFO, "%s: %s", text, OptionText(option("disk_budget")))
            self._logged, self._logged_at = refused, time.monotonic()

    def _write(self, disk: Disk, batch: list[tuple[Label, Bytes]]) -> None:
        erased = set[bytes]()

        def wanted(label: Label) -> bool:
            if self._erased(disk, label):
                erased.add(label.key)
            return label.key not in erased

        stored, gone = disk.write(batch, self._spared, wanted)
        self.counters["saved"] += len(stored)
        self.counters["evicted"] += len(gone)
        self._forget(gone)
        done = {label.key for label in stored}
        self._known |= done
        for label, payload in batch:
            reason = "erased" if label.key in erased else "budget"
            self._end(ObjectStored(label) if label.key in done else ObjectRefused(label, reason), payload)

    def _end(self, notice: ObjectStored | ObjectRefused, payload: Bytes) -> None:
        if isinstance(notice, ObjectRefused):
            self.counters[f"skipped_{notice.reason}"] += 1
        self._notices.append(notice)
        with self._lock:
            self._waiting -= len(payload)

    def _reconcile(self, disk: Disk) -> None:
        """Cleans up after crashes: of all processes at the start, and of other processes later."""
        if self._tidied == float("-inf") or disk.strays():
            found, gone = disk.reconcile()
            self._looked = -math.inf  # what was found may be expired
            if found or gone:
                log.info("after a crash: %s found again, %s dropped", count(len(found), "object"), count(len(gone), "row"))
            self._forget(gone)
        self._tidied = time.monotonic()

    def _forget(self, gone: Collection[bytes], notice: type[ObjectGone | ObjectErased] = ObjectGone) -> None:
        self._known.difference_update(gone)
        self._notices.extend(map(notice, gone))

    def _expire(self, disk: Disk) -> None:
        """Erases expired objects from time to time."""
        if self._terms_seen != self._terms.version:
            self._terms_seen, self._looked = self._terms.version, -math.inf
        now = self._clock()
        if abs(now - self._looked) >= self._terms.look:  # the clock may be set back
            self._agree(disk)
            erased, evicted = disk.expire(self._terms, self._spared)
            self.counters.update(["erased"] * len(erased) + ["evicted"] * len(evicted))
            self._forget(erased, ObjectErased)
            self._forget(evicted)
            self._agree(disk)  # `expire` may have removed some terms
            self._looked = now

    def _agree(self, disk: Disk) -> None:
        """Writes the terms that were set here into the catalogue, and reads those of other processes."""
        news = self._terms.news()
        disk.catalog.ages.keep(news, self._clock())
        self._terms.learn(disk.catalog.ages.terms(), news)

    def _erased(self, disk: Disk, label: Label) -> bool:
        """Whether a user has deleted this object since the folder was opened, so that it must not be written."""
        wiped, _ = disk.catalog.ages.wiped()
        before = self._terms.before if self._terms.obeyed == wiped else wiped
        if wiped not in (0.0, self._wiped_first) and label.written <= before:
            return True
        return label.key in self._known and label.key not in disk and not disk.catalog.ghosts([label.key])

    def _housekeep(self, disk: Disk) -> None:
        uses = [self._uses.popleft() for _ in range(len(self._uses))]
        if uses:
            disk.catalog.use(uses)
        replies = [self._replies.popleft() for _ in range(len(self._replies))]
        if replies:
            disk.catalog.replied(replies)
        erased = self._look(disk)
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        if notes and self._wiped is not None:
            kept = [note for note in notes if note.block not in erased]
            disk.catalog.note(self._fingerprint, kept, self._clock(), since=self._wiped[0])

    def _look(self, disk: Disk) -> Set[bytes]:
        """Reports objects that other processes have added or removed. Returns the keys of those that were deleted by a user."""
        erased = frozenset[bytes]()
        version, again = disk.catalog.version(), self._again and not self._hangs
        if version == self._version and not again:
            return erased
        self._again, self._seen = self._again and not again, 0 if again else self._seen
        wiped = disk.catalog.ages.wiped()  # read before the keys, so that no deletion is missed
        if self._version and version[0] != self._version[0]:
            vanished = self._known - disk.catalog.keys()
            erased = frozenset(vanished - disk.catalog.ghosts(vanished))
            self._forget(vanished - erased)
            self._forget(erased, ObjectErased)
            self._agree(disk)
        self._note_wipe(disk, wiped)
        self._version = version
        rows = list(disk.catalog.rows(self._fingerprint, self._seen))
        self._seen = max((row.number for row in rows), default=self._seen)
        for row in sorted(rows, key=lambda row: row.label.start):  # parents first: the owner is known from them
            self._known.add(row.label.key)
            self._notices.append(ObjectFound(row.label))
        self._look_at_pins(disk)
        for number, note in disk.catalog.notes(self._fingerprint, self._seen_notes):
            self._seen_notes = number
            self._notices.append(NoteFound(note))
        self._sizes = (disk.used, disk.budget, disk.reserved, len(disk))
        return erased

    def _look_at_pins(self, disk: Disk) -> None:
        if (pinned := disk.catalog.pinned(self._fingerprint)) != self._pinned:
            self._pinned = pinned
            self._notices.append(PinsFound(pinned))

    def _note_wipe(self, disk: Disk, wiped: tuple[float, int]) -> None:
        before, self._wiped = self._wiped, wiped
        if before is None:
            self._wiped_first = wiped[0]
        elif wiped != before:
            self._foreign = disk.catalog.foreign(self._fingerprint)
            self._notes.clear()
            if wiped[0] != before[0]:
                self._notices.append(EverythingErased(wiped[0]))
            if wiped[0] == before[0] or wiped[1] > before[1] + 1:  # several deletions at once: one may have been of a chain
                self._notices.append(EverythingErased(0.0))

    def _open(self) -> bool:
        try:
            self._disk = self._opens()
            self._disk.catalog.ages.keep(self._terms.owners, self._clock())  # the catalogue may be a new one
            self._agree(self._disk)
            self._expire(self._disk)
            self._seen, self._seen_notes, self._version, self._tidied = 0, 0, (), float("-inf")
            if self._disk.budget <= RESERVE:
                warning = "nothing fits on %s of disk: free some, or give more %s"
                log.warning(warning, show_size(self._disk.budget), OptionText(option("disk_budget")))
            self._look(self._disk)
            self._foreign = self._disk.catalog.foreign(self._fingerprint)
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        if not self._failing_until:
            log.warning("the disk fails, serving goes on without it: %s", error)
        _clear_frames(error)
        self._failing_until = time.monotonic() + PATIENCE
        self.counters["faults"] += 1
        if self._disk is not None and _only_writing(error):
            with suppress(OSError, sqlite3.Error):
                self._disk.measure()  # other files may need the space
                self._forget(self._known - self._disk.catalog.keys())  # evicted for objects that were then not written
            return
        disk, self._disk = self._disk, None  # opened again later: the folder may be gone
        self._forget(list(self._known))
        if disk is not None:
            _close(disk, damaged=damages(error))


def _clear_frames(error: BaseException | None) -> None:
    """Drops the local variables of the calls that failed. One may be a statement that has rows left, and SQLite keeps its files
    open until the statement is gone. Logs, for example, can keep an error for long.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _only_writing(error: Exception) -> bool:
    """Whether the disk can still be read: it is full, read-only, or locked by another process for long."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EAGAIN)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_BUSY)


def _close(disk: Disk, *, damaged: bool = False) -> None:
    try:
        if damaged:
            disk.abandon_catalog()
        else:
            disk.close()
    except (OSError, sqlite3.Error) as error:
        log.warning("the disk could not be closed: %s", error)
