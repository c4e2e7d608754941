"""Write-behind: a thread between the engine and the disk. The engine offers objects and continues; it never waits for a write.

The thread reports results as notices (`notices`): objects that were stored or refused, and new objects of other processes.
After an error, the disk is not used for a while and then tried again. Meanwhile all objects are refused, and requests are
served from memory.
"""

from __future__ import annotations

import errno
import logging
import math
import sqlite3
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from headstart.errors import Conflict, Unavailable
from headstart.futures import pass_on
from headstart.interfaces.tier import KV
from headstart.interfaces.tokens import Bytes
from headstart.names import OptionText, option
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.tiers.catalog_watch import CatalogWatch
from headstart.tiers.disk import Disk, FormatError, Label, Note
from headstart.tiers.disk.schema import damages
from headstart.tiers.disk.store import RESERVE
from headstart.tiers.disk_reads import DiskReads
from headstart.tiers.notices import Notice, ObjectErased, ObjectFound, ObjectGone, ObjectRefused, ObjectStored
from headstart.tiers.upkeep import Upkeep
from headstart.tiers.write_queue import DiskCall, Offer, WriteQueue
from headstart.units import count, show_size

log = logging.getLogger("headstart.disk")

T = TypeVar("T")

POLL = 0.25
"""Seconds between two searches for objects of other processes."""
PATIENCE = 10.0
"""Seconds for which a disk is not used after an error."""
_DISK_ERRORS = (OSError, sqlite3.Error, FormatError, MemoryError)
"""Errors of a machine. Others are faults of this program, or come from a catalogue with values of other types."""
NEWS = 1 << 16
"""Most uses, replies and notes that wait while the disk is busy."""
SOME = 1000
"""Most notices that one call returns."""
BACKLOG = 1000
"""Notices that wait for the engine thread, from which on no further objects are looked for."""
SHORT = 0.005
"""Seconds between two pieces of work that nobody waits for."""
GRACE = 5.0
"""Seconds for which stopping waits for a running write."""
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
        self._opens = opens
        self._fingerprint = fingerprint
        self._disk: Disk | None = None
        self._queue = WriteQueue(limit)
        self._reads = DiskReads(
            *(lambda: self._disk, fingerprint, self._terms, clock),
            counters=self.counters,
            wake=self._queue.wake,
            unexpected=self._say_internal,
        )
        self._watch = CatalogWatch(fingerprint, clock())
        self._upkeep = Upkeep(
            *(self._watch, self._terms, clock), counters=self.counters, spared=self._reads.spared, gone=self._forget
        )
        self._after_round: deque[Callable[[], None]] = deque()
        self._to_delete: set[bytes] = set()  # keys to delete next; only for the thread
        self._to_report: deque[tuple[Collection[bytes], Future[None]]] = deque()  # to look for again; only for the thread
        self._notices: deque[Notice] = deque()
        self._uses: deque[tuple[bytes, float]] = deque(maxlen=NEWS)
        self._replies: deque[tuple[bytes, RequestTraits]] = deque(maxlen=NEWS)
        self._notes: deque[Note] = deque(maxlen=NEWS)
        self._logged = (0, 0)  # the counters at the last log line
        self._logged_at = -math.inf
        self._tombstone = 0  # the number of the latest one that the engine thread obeys
        self._begun = False  # whether anything may have been stored
        self._ended = False  # whether the thread does nothing more
        self._deletions: tuple[float, int] | None = None  # those of which all notices are in the queue
        self._listed = True  # whether the notices of all objects are in the queue; none are while the disk cannot be used
        self._own_pins: set[bytes] = set()  # keys that were not pinned before this process did so
        self._erased_now: set[bytes] = set()  # by users, in this round: what was offered before must not be written
        self._sizes = (0, 0, 0, 0)
        self._measured: tuple[int, ...] = ()  # the catalogue's version then
        self._foreign: Mapping[bytes, Set[bytes]] = {}
        self._ends = math.inf
        self._internal: set[type[Exception]] = set()  # types of errors of this program that were logged
        self._failing_until = 0.0
        self._open()
        self._begun = True
        self._thread = threading.Thread(target=self._loop, name="headstart-disk", daemon=True)
        self._thread.start()

    @property
    def on(self) -> bool:
        return True

    @property
    def deletions(self) -> tuple[float, int] | None:
        return None if self._disk is None else self._deletions

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
        queued = self._queue.offer(Offer(label, payload, self._tombstone), last=last)
        if not queued:
            self.counters["skipped_full"] += 1
        return queued

    def discard(self, keys: Collection[bytes]) -> None:
        self._queue.discard(keys)

    def pin(self, keys: Collection[bytes]) -> Future[bool]:
        def pin(disk: Disk) -> bool:
            new = disk.pin(keys)
            self._own_pins.difference_update(keys)
            self._own_pins |= new or set()
            self._notices.extend(self._watch.pins(disk.catalog))
            return new is not None

        return self._ask(pin, after_writes=True)

    def unpin(self, keys: Collection[bytes], *, own: bool = False) -> Future[None]:
        def unpin(disk: Disk) -> None:
            gone = self._own_pins.intersection(keys) if own else keys
            self._own_pins.difference_update(keys)
            disk.catalog.unpin(gone)
            self._notices.extend(self._watch.pins(disk.catalog))

        return self._ask(unpin, after_writes=True)  # after a pin that still waits

    def erase(self, keys: Collection[bytes], owner: bytes) -> Future[int]:
        erased, done = Future[int](), Future[int]()
        # The objects that the thread has in hand may be among them. They are answered in this round too.
        erased.add_done_callback(lambda _: self._after_round.append(partial(pass_on, erased, done)))

        def erase(disk: Disk) -> int:
            for one in self._queue.take_discarded():
                self._refuse(one, "discarded")
            going = {*keys, *self._expired_after(disk, keys)}
            self._erased_now.update(going)
            before = disk.catalog.ages.own
            try:
                gone = disk.erase(going, owners=[owner])
            finally:
                self._watch.buried_here(disk.catalog.ages.own_tombstones)
            # Another process may have evicted some just before. Their ghosts are gone too, so no look would find that.
            evicted = {key for key in going if key in self._watch.known}
            self._forget(evicted.union(row.label.key for row in gone), ObjectErased)
            self._watch.erased_here(disk.catalog.ages.own - before)
            return sum(row.allocated for row in gone)

        self._ask(erase, done=erased)
        return done

    def _expired_after(self, disk: Disk, keys: Collection[bytes]) -> set[bytes]:
        """What follows some objects and has expired, or nearly. The engine thread may have forgotten it already, so it seems
        that nothing follows; but its rows name its parent."""
        found, above, now = set[bytes](), list(keys) if self._terms.shortest < math.inf else [], self._clock()
        while above:
            for key in disk.catalog.children(above.pop()).difference(keys, found):
                row = disk.catalog.get(key)
                if row is not None and not row.pinned and row.label.written <= self._terms.earliest_cut(row.label.owner, now):
                    found.add(key)
                    above.append(key)
        return found

    def _ask(self, work: Callable[[Disk], T], *, after_writes: bool = False, done: Future[T] | None = None) -> Future[T]:
        """Lets the thread do something soon. The future raises Unavailable if the disk cannot be used.

        `after_writes`: not before all that was offered until now is stored or refused.
        """
        done = Future() if done is None else done

        def answer(disk: Disk | None) -> None:
            unusable = Unavailable("The disk cannot be used now; the server's log says why.", retry_after=PATIENCE)
            if disk is None:
                done.set_exception(unusable)
                return
            try:
                done.set_result(work(disk))
            except Conflict as error:
                done.set_exception(error)
            except Exception:
                done.set_exception(unusable)
                raise

        self._queue.ask(answer, after_writes=after_writes)
        if self._ended:
            self._refuse_asked()
        return done

    @property
    def listed(self) -> bool:
        return self._listed

    @property
    def hides(self) -> bool:
        again = self._reads.again and self._disk is not None  # all are told when it is opened
        return again or bool(self._reads.bad)

    def find(self, keys: Sequence[bytes]) -> list[Label]:
        return self._reads.find(keys)

    def report(self, keys: Collection[bytes]) -> Future[None]:
        told = Future[None]()

        def ask(_: Disk | None) -> None:  # which is None too while the disk only cannot be written
            if self._disk is None:
                told.set_result(None)
            else:
                self._to_report.append((keys, told))

        self._queue.ask(ask, after_writes=True)
        return told

    def read(self, wanted: Sequence[tuple[Label, Bytes]]) -> list[int | Exception]:
        return self._reads.read(wanted)

    def keep(self, keys: Collection[bytes]) -> None:
        self._reads.keep(keys)

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

    def obey(self, tombstone: int) -> None:
        self._tombstone = tombstone

    def close(self, seconds: float) -> bool:
        self._ends = time.monotonic() + seconds
        self._queue.end()
        self._thread.join(seconds + GRACE)
        if left := self._queue.waiting:
            log.warning("stopped with %s not yet on disk; give more %s", show_size(left), OptionText(option("drain")))
        return not (self._thread.is_alive() or self._reads.hang)

    # ── the thread's side ────────────────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        closing = False
        while not closing and time.monotonic() < self._ends:
            now = self._queue.collect(self._pause)
            self._work(self._wanted(now.batch), now.then)
            self._to_delete |= now.discarded
            self._queue.discards_done(now.discarded)
            closing = now.ends
        self._ended = True
        self._refuse_asked()
        if self._disk is not None:
            _close(self._disk)

    def _refuse_asked(self) -> None:
        """Answers those that still wait for something when the thread has ended."""
        self._queue.refuse_all()
        self._end_round()

    def _end_round(self) -> None:
        """Does what had to wait for the end of a round."""
        with suppress(IndexError):
            while True:
                self._after_round.popleft()()

    def _pause(self) -> float:
        """Seconds to wait for work."""
        if self._watch.more and self._disk is not None and time.monotonic() >= self._failing_until:
            return 0.0 if len(self._notices) < BACKLOG else SHORT
        if self._to_report and time.monotonic() >= self._failing_until:  # it is empty while the disk is closed
            return 0.0  # an owner may wait for that
        return SHORT if self._upkeep.busy else POLL

    def _wanted(self, batch: list[Offer]) -> list[Offer]:
        """The objects of a batch, without those that were discarded after they were offered."""
        unwanted = self._queue.unwanted(batch)
        for one in batch:
            if one.label.key in unwanted:
                self._refuse(one, "discarded")
        return [one for one in batch if one.label.key not in unwanted]

    def _work(self, batch: list[Offer], then: DiskCall | None) -> None:
        """One round of work. An error of the disk ends it, and refuses the batch. `then` is done after the batch."""
        reason = "failing"
        self._erased_now.clear()
        try:
            if time.monotonic() >= self._failing_until and (self._disk is not None or self._open()):
                disk = self._disk
                assert disk is not None
                self._upkeep.tidy(disk)
                while bad := self._reads.bad:  # before it is written again
                    row = disk.quarantine(bad[0])
                    if row is not None:
                        self._watch.known.add([row.label.key])
                        self._notices.append(ObjectFound(row.label))
                    bad.popleft()  # afterwards, because of `hides`
                self._upkeep.expire(disk)
                self._queue.answer(disk)
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
                if then is not None:
                    call, then = then, None
                    call(disk)
                self._housekeep(disk)
        except Exception as error:  # any error: the thread must go on, or offered objects get no answer
            self._fail(error)
            reason = "fault"
        if self._disk is None or time.monotonic() < self._failing_until:
            self._queue.answer(None)
        for one in batch:
            self._refuse(one, reason)
        if then is not None:
            then(None)
        self._end_round()
        self._log_refused()

    def _log_refused(self) -> None:
        """Logs from time to time how many objects were refused."""
        refused = self.counters["skipped_full"], self.counters["skipped_budget"]
        if refused != self._logged and time.monotonic() >= self._logged_at + LOG_EVERY:
            full, budget = (now - before for now, before in zip(refused, self._logged, strict=True))
            text = f"{count(full, 'object')} wait until the disk has time, {count(budget, 'object')} not stored"
            log.log(logging.WARNING if budget else logging.INFO, "%s: %s", text, OptionText(option("disk_budget")))
            self._logged, self._logged_at = refused, time.monotonic()

    def _write(self, disk: Disk, batch: list[Offer]) -> None:
        unwanted, coming = dict[bytes, str](), dict[bytes, Label]()
        seen = {one.label.key: one.tombstone for one in reversed(batch)}  # if one comes twice, that of the first

        def wanted(label: Label) -> bool:
            if self._erased(disk, label) or self._wiped(disk, label, coming):
                unwanted[label.key] = "erased"
            elif self._watch.outdated(disk.catalog, label, seen[label.key]):
                unwanted[label.key] = "outdated"
            else:
                coming[label.key] = label
            return label.key not in unwanted

        stored, gone = disk.write([(one.label, one.payload) for one in batch], self._reads.spared, wanted)
        self.counters["saved"] += len(stored)
        self.counters["evicted"] += len(gone)
        self._forget(gone)
        done = {label.key for label in stored}
        self._watch.known.add(done)
        for one in batch:
            if one.label.key in done:
                self._end(one, ObjectStored(one.label))
            else:
                self._refuse(one, unwanted.get(one.label.key, "budget"))

    def _refuse(self, one: Offer, reason: str) -> None:
        self.counters[f"skipped_{reason}"] += 1
        self._end(one, ObjectRefused(one.label, reason))

    def _end(self, one: Offer, notice: ObjectStored | ObjectRefused) -> None:
        self._notices.append(notice)
        self._queue.answered(one)

    def _forget(self, gone: Collection[bytes], notice: type[ObjectGone | ObjectErased] = ObjectGone) -> None:
        self._watch.known.remove(gone)
        self._notices.extend(map(notice, gone))

    def _erased(self, disk: Disk, label: Label) -> bool:
        """Whether an object must not be written: it has expired, or a user has deleted it since the folder was opened."""
        over = self._terms.cut(label.owner, self._clock()) if label.owner else -math.inf
        if label.key in self._erased_now or 0 < label.written <= over:
            return True
        return label.key in self._watch.known and label.key not in disk and not disk.catalog.ghosts([label.key])

    def _wiped(self, disk: Disk, label: Label, coming: Mapping[bytes, Label]) -> bool:
        """Whether an object must not be written because a user has deleted everything of its time.

        `coming`: objects that will be written before it.
        """
        (wiped, _), obeyed = disk.catalog.ages.wiped(), self._terms.before
        known = wiped in (0.0, self._watch.wiped_first, self._terms.obeyed)
        if label.written > (obeyed if known else max(obeyed, wiped)):
            return False
        if label.kind == KV:
            return True
        # A checkpoint is as old as the oldest text before it. If that is there, a pinned chain needs it, or it is younger.
        block: Label | None = label
        while block is not None and (block.start or block.kind != KV):
            key = block.parent
            row = None if key in coming else disk.catalog.get(key)
            block = coming.get(key, None if row is None else row.label)
        return block is None

    def _housekeep(self, disk: Disk) -> None:
        uses = [self._uses.popleft() for _ in range(len(self._uses))]
        if uses:
            disk.catalog.use(uses)
        replies = [self._replies.popleft() for _ in range(len(self._replies))]
        if replies:
            disk.catalog.replied(replies)
        self._look(disk)
        if self._to_report:
            keys, told = self._to_report[0]
            self._notices.extend(self._watch.told_again(disk.catalog, keys))
            self._to_report.popleft()  # afterwards: a fault may end this
            told.set_result(None)
        if self._watch.wiped is not None and self._watch.compared:
            erased = self._watch.take_erased()
            notes = [self._notes.popleft() for _ in range(len(self._notes))]
            if kept := [note for note in notes if note.block not in erased]:
                disk.catalog.note(self._fingerprint, kept, self._clock(), since=self._watch.wiped)

    def _look(self, disk: Disk) -> None:
        """Reports objects that other processes have added or removed."""
        disk.compare()
        version = disk.catalog.version()
        again, wiped = self._reads.again and not self._reads.hang, self._watch.wiped
        if again:
            self._listed = self._reads.again = False
        reports = len(self._notices) < BACKLOG
        try:
            self._notices.extend(self._watch.look(disk.catalog, again=again, reports=reports, tidied=not self._upkeep.untidied))
        except BaseException:
            self._notices.extend(self._watch.take_found())
            if again:
                self._reads.again = True
            raise
        self._deletions = self._watch.wiped
        if not self._listed:
            self._listed = self._watch.complete and not (self._watch.more or self._upkeep.untidied)
        if found := self._reads.looked_up:  # afterwards: whatever goes from now on is found by the next look
            keys = {found.popleft() for _ in range(len(found))}
            self._notices.extend(self._watch.looked_up(disk.catalog, keys))
        if self._watch.foreign_writes:
            self._upkeep.agree(disk)
        if wiped is not None and wiped != self._watch.wiped:
            self._foreign = disk.catalog.foreign(self._fingerprint)
            self._notes.clear()
        if version != self._measured:
            self._measured, self._sizes = version, (disk.used, disk.budget, disk.reserved, len(disk))

    def _open(self) -> bool:
        self._listed = False
        try:
            self._disk = self._opens()
            self._watch.restart()  # before anything is written: what cannot be written yet may be read, and is to be reported
            small = self._upkeep.small(self._disk)
            if not small:  # its clean-up waits until all rows are read. What follows here may fail, and the disk be used
                self._disk.keep_room()
            if not self._begun:
                self._watch.begin(self._disk.catalog)
                self._tombstone = self._watch.tombstone
            self._upkeep.restart()
            self._measured = ()
            self._disk.catalog.ages.keep(self._terms.owners, self._clock())  # the catalogue may be a new one
            self._upkeep.agree(self._disk)
            self._disk.catalog.ranks.learn(self._clock())
            if self._disk.budget <= RESERVE:
                warning = "nothing fits on %s of disk: free some, or give more %s"
                log.warning(warning, show_size(self._disk.budget), OptionText(option("disk_budget")))
            self._sizes = (self._disk.used, self._disk.budget, self._disk.reserved, len(self._disk))
            # Beside a large catalogue there are at most the objects of the writes in which processes have crashed.
            self._upkeep.untidied = small and self._disk.strays()
            if small:  # otherwise the thread does it, piece by piece
                self._upkeep.expire(self._disk, whole=True)
                while self._watch.more and len(self._notices) < BACKLOG:
                    self._look(self._disk)
            self._foreign = self._disk.catalog.foreign(self._fingerprint)
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _say_internal(self, error: Exception) -> bool:
        """Logs an error of this program, each type once: it may come at every read. Returns whether it is one."""
        internal = not isinstance(error, _DISK_ERRORS)
        if internal and type(error) not in self._internal:
            self._internal.add(type(error))
            log.error("an internal error of the disk tier, serving goes on without what it concerns", exc_info=error)
        return internal

    def _fail(self, error: Exception) -> None:
        replaced = isinstance(error, OSError) and error.errno == errno.ESTALE
        if replaced:
            log.warning("another process has replaced the folder or its catalogue: it is opened again")
        elif not (self._say_internal(error) or self._failing_until):
            log.warning("the disk fails, serving goes on without it: %s", error)
        _clear_frames(error)
        self._upkeep.stop()
        self._failing_until = time.monotonic() + (0.0 if replaced else PATIENCE)
        self.counters["faults"] += 1
        if self._disk is not None and _only_writing(error):
            with suppress(OSError, sqlite3.Error):
                self._disk.measure()  # other files may need the space
                self._look(self._disk)  # some may have been evicted for objects that were then not written
            return
        disk, self._disk, self._listed = self._disk, None, True  # opened again later: the folder may be gone
        self._notices.extend(map(ObjectGone, self._watch.lose_sight()))
        while self._to_report:
            self._to_report.popleft()[1].set_result(None)
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
