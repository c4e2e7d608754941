"""Scheduler: runs the engine, on the engine thread.

    loop:  take in → notices of tiers → cancel → fetch → expire → admit (plan, restore) → one token for each running reply
           → one prefill call for one prompt → save
    idle:  save what is live → settle finished turns

Prefill and decode never share a call, so neither changes the other's bits (`prefill`, `decode`). A request waits if another one
is computing its prefix (`admission`). KV is saved (`kv_save`) before a slot is reused, when another request needs it, and when
the engine is idle.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

from headstart.errors import EngineError, HeadstartError, Unavailable
from headstart.explain.history import History, NoHistory, RecentHistory
from headstart.prefix_cache.planner import Mode
from headstart.prompt.builder import Prompter
from headstart.serving import settle
from headstart.serving.admission import Admission
from headstart.serving.cache import Cache
from headstart.serving.decode import Decode
from headstart.serving.engine_calls import EngineCalls
from headstart.serving.engine_thread import EngineThread
from headstart.serving.expiry import Expiry
from headstart.serving.gate import OwnProcess
from headstart.serving.job import Job, Ticket
from headstart.serving.late_fetch import LateFetch
from headstart.serving.portions import LongWork
from headstart.serving.prefill import Prefill
from headstart.serving.recording import Recording
from headstart.serving.request import Failed
from headstart.serving.running_jobs import Outcome, RunningJobs
from headstart.serving.shared_audit import SharedAudit
from headstart.serving.shared_fetch import SharedFetch
from headstart.serving.shared_preload import Preload, SharedPreload
from headstart.serving.slots import Slot
from headstart.serving.turn import ReturnedTurn

log = logging.getLogger("headstart.scheduler")

T = TypeVar("T")

IDLE_SAVE = 0.05
"""Seconds without work after which live KV is saved."""

PARKED = 0.05
"""Most seconds between two looks at the shared tier while every request waits for it. What arrives wakes the loop at once."""

IDLE_POLL = 1.0
"""Most seconds between two reads of the disk's notices while the engine is idle."""

INTERNAL = "internal error; the log says which"


class Scheduler:
    """Serves tickets with one engine. The methods below *any thread* are thread-safe; all others run on the engine thread.

    Args:
        thread: the engine thread. It runs the scheduler from now until `close`.
        stall: seconds that a prefill call may take while replies are running.
        patience: the same while no reply is running. It is doubled for a prompt that no other request waits behind.
        settles: whether finished turns are settled while the engine is idle.
        explains: whether the latest requests are recorded, to explain later ones.
        observe: called with every finished choice, on the engine thread.
    """

    def __init__(
        self,
        thread: EngineThread,
        cache: Cache,
        prompter: Prompter,
        mode: Mode,
        *,
        stall: float = 0.25,
        patience: float = 1.0,
        settles: bool = True,
        explains: bool = True,
        observe: Callable[[Outcome], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine = thread.engine
        self.cache = cache
        self.slots = [Slot(number, engine.shape, engine.traits.block_size) for number in range(engine.shape.slots)]
        self.history: History = RecentHistory() if explains else NoHistory()
        self.waiting: deque[Job] = deque()
        self._mode = mode
        self._stall = stall
        self._clock = clock
        self.process = OwnProcess()
        self._inbox: queue.SimpleQueue[Ticket | ReturnedTurn | None] = queue.SimpleQueue()
        self._calls = EngineCalls(self.process, self.wake, clock)
        self.portions = self._calls.portions
        self._preloads: queue.SimpleQueue[Preload] = queue.SimpleQueue()
        self._preloading: SharedPreload | None = None
        self._lost: list[Slot] = []  # what the engine holds in them is not known; they are busy
        template = prompter.template.source
        self._listener = listener = cache.store.listener
        self._admission = Admission(engine, cache, self.slots, mode, self.history, template, clock)
        self.settle: settle.Settling = settle.NoSettle()
        if settles:
            self.settle = settle.Settle(engine, cache, self.slots, mode, prompter, self._admission)
        self.shared_audit = SharedAudit(
            *(engine, cache, self.slots, mode, self._admission), lambda keys: self.expiry.drop_wrong(keys)
        )
        self.shared_fetch = SharedFetch(
            *(engine, cache.store, self._admission, self.shared_audit),
            stateful=mode.traits.stateful,
            deletion_count=lambda: self.expiry.deletion_count,
            wake=self.wake,
        )
        self._late_fetch = LateFetch(self.shared_fetch, self._admission, clock)
        self.expiry = Expiry(
            *(engine, cache, self.slots, prompter, self.settle, self.shared_audit, self.history),
            *(self._admission.empty, self.shared_fetch.unpin, self.portions),
        )
        self._recording = Recording(cache, self.slots, prompter, self.history, self.expiry, self.settle, clock)
        self._running = RunningJobs(
            *(engine, self._admission, self.shared_fetch, self._late_fetch, self._recording, listener),
            mode=mode,
            observe=observe,
            clock=clock,
        )
        self._decode = Decode(engine, cache, self._running, listener, mode, clock)
        self.prefill = Prefill(
            *(engine, cache, self._admission, self._running, self._decode, listener, mode),
            stall=stall,
            patience=patience,
            clock=clock,
        )
        self._arriving = 0
        self._returning = 0
        self._lock = threading.Lock()  # of these two
        self._closed = False
        self._settle_until = -math.inf
        self._idled = clock()  # the last idle work
        self._ended = thread.submit(self._loop)

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, ticket: Ticket) -> None:
        if self._closed:
            raise Unavailable("The server is stopping.")
        with self._lock:
            self._arriving += 1
        self._inbox.put(ticket)
        if self._closed:  # the loop may have ended without seeing it
            ticket.emit(Failed(Unavailable("The server is stopping.")))

    def remember(self, returned: ReturnedTurn) -> None:
        """Queues a returned turn. It is recorded before any request that is submitted later."""
        with self._lock:
            self._returning += 1
        self._inbox.put(returned)

    def wake(self) -> None:
        """Wakes an idle loop, so that it sees cancelled tickets."""
        self._inbox.put(None)

    def erase(self, number: int) -> Future[int | None]:
        """Empties a slot between two steps. The result is the number of its tokens, or None if the slot is in use."""

        def empty() -> int | None:
            slot = self.slots[number]
            count = None if slot.busy else len(slot)
            if count and not self._closed:
                self._admission.empty(slot)
            return count

        return self.call(empty)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function on the engine thread between two steps. Raises Unavailable in a forked process."""
        return self._calls.call(function)

    def carry_out(self, work: LongWork[T]) -> Future[T]:
        """Does long work on the engine thread, in pieces between its steps. Raises Unavailable in a forked process."""
        return self._calls.carry_out(work)

    def preload(self, preload: Preload) -> None:
        """Begins a preload, after those that began before. Raises Unavailable in a forked process."""
        self.process.check()
        self._preloads.put(preload)
        self.wake()
        if self._closed:  # the loop may have ended without seeing it
            preload.over.set()

    def prefill_tokens(self, seconds: float) -> int:
        """About how many tokens can be prefilled in `seconds`; 0 if the pace is not known yet."""
        return self._admission.pace.tokens(seconds)

    @property
    def pace(self) -> float | None:
        """Measured seconds of prefill per token; None if not known yet."""
        return self._admission.pace.prefill or None

    def saved(self, live: int, restored: int) -> float:
        """About how many seconds of prefill cached tokens save; 0 if the pace is not known yet. Thread-safe."""
        return self._admission.pace.saved(live, restored)

    def close(self, settle_until: float = -math.inf) -> None:
        """Fails all running and waiting requests, and frees the engine thread. Idempotent.

        Args:
            settle_until: the time, by the scheduler's clock, until which finished turns are settled. Without running requests
                only.
        """
        self._settle_until = settle_until
        self._calls.ends_with(self._ended)  # before the loop can end: whoever called earlier is answered by it
        self._closed = True
        self._inbox.put(None)
        if (error := self._ended.exception()) is not None:
            log.error("the scheduler failed", exc_info=error)

    @property
    def running(self) -> int:
        """Number of choices that have a slot."""
        return len(self._running)

    @property
    def jobs(self) -> list[Job]:
        """The choices that have a slot. A copy, for any thread."""
        return list(self._running.jobs)

    @property
    def queued(self) -> int:
        """Number of choices and requests that wait for a slot."""
        return len(self.waiting) + self._arriving

    @property
    def alive(self) -> bool:
        """Whether the engine thread still runs it."""
        return not (self._ended.done() or self.process.left)

    @property
    def idle(self) -> bool:
        """Whether there is no request, and no turn to settle."""
        return not (self.running or self.queued or self._returning or self.settle.pending)

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        while not self._closed:
            try:
                self._take_in()
                self.cache.store.offload.take_notices()
                self.cache.store.shared_offer.take_answers()
                self._drop_cancelled()
                self.shared_fetch.step()
                self._fetch_late()
                self._preload()
                self.expiry.step()
                self._calls.answer()
                self.portions.step()
                if self.waiting:
                    self._empty_lost()
                self._admit()
                self._decode.step()
                self.prefill.step(self.waiting)
                self.cache.kv_save.secure(self.slots)
            except Exception:  # an internal error must not leave callers without an answer
                log.exception("the scheduler failed")
                self._abandon(EngineError(INTERNAL))
            self._tell()
        try:
            self._take_in()  # turns that callers have returned already
            while not (self._running or self._lost) and self._clock() < self._settle_until and self.settle.step():
                pass
        except Exception:
            log.exception("the last turns could not be settled")
        self._calls.finish()  # whoever called before `close` has left it to this loop to answer
        try:
            self.cache.kv_save.flush(self.slots)
        except Exception:
            log.exception("the KV of the slots could not be saved")
        if self._preloading is not None:
            self._preloading.end()
        while not self._preloads.empty():
            self._preloads.get().over.set()
        self._abandon(Unavailable("The server is stopping."))
        self.shared_fetch.close()

    def _tell(self) -> None:
        try:
            self._listener.stepped(self.slots, self._running.jobs, self.waiting)
        except Exception:
            log.exception("the listener failed")

    def _take_in(self) -> None:
        busy = bool(self._running or self.waiting or self._closed)
        parked = busy and not (self._running or self._closed) and all(job.parked for job in self.waiting)
        while True:
            try:
                if parked:
                    item, parked = self._inbox.get(timeout=PARKED), False
                else:
                    item = self._inbox.get_nowait() if busy else self._wait()
            except queue.Empty:
                return
            if isinstance(item, Ticket):
                try:
                    self._arrive(item)
                except Exception:  # others must not fail with it
                    log.exception("a request could not be queued")
                    item.emit(Failed(EngineError(INTERNAL)))
                with self._lock:
                    self._arriving -= 1
            elif item is not None:
                self._running.worked = self._clock()
                try:
                    self._recording.returned(item)
                except Exception:  # the request is over, and others must not fail with it
                    log.exception("a turn could not be recorded")
                with self._lock:
                    self._returning -= 1
            busy = True

    def _arrive(self, ticket: Ticket) -> None:
        for job in Job.all_of(ticket, self.engine, self._clock()):
            self.waiting.append(job)
            if job.choice == 0 and job.request.params.reuse:
                self.cache.store.offload.find(job.chain)
            try:
                self.shared_fetch.begin(job)
            except Exception:  # it is computed
                log.exception("the shared tier could not be asked")
            self._listener.arrived(job, self._admission.available)

    def _wait(self) -> Ticket | ReturnedTurn | None:
        idle: float | None = IDLE_SAVE
        while True:
            # Not from now on: who calls often (`call`) must not keep idle work from being done.
            left = None if idle is None else max(self._running.worked, self._idled) + idle - self._clock()
            try:
                return self._inbox.get(timeout=left) if left is None or left > 0 else self._inbox.get_nowait()
            except queue.Empty:
                idle = self._idle(idle or 0.0)
                self._idled = self._clock()
                self._tell()

    def _idle(self, pause: float) -> float | None:
        """Does idle work. Returns how many seconds to sleep; None to sleep until something arrives."""
        active = self.cache.store.offload.take_notices()
        active |= self.cache.store.shared_offer.take_answers()
        self.expiry.step()
        if self.portions.step():
            return 0.0
        self.cache.store.offload.ask()  # at once: an owner may wait for the answer
        if pause:  # not between two calls of settling, which would save the slot each time
            for slot in self.slots:
                if self._inbox.empty():
                    self.cache.kv_save.save(slot)
        if self.cache.store.offload.behind:
            return 0.0
        with suppress(Exception):  # it was logged when it failed first
            self._empty_lost()
        if self._lost:
            return IDLE_POLL
        if self.cache.store.barred:  # until a deletion has ended, slots may not be saved, so nothing may overwrite them
            return IDLE_POLL
        if self.settle.pending:
            wait = self._running.worked + settle.AFTER - self._clock()
            return wait if wait > 0 else 0.0 if self.settle.step() else IDLE_SAVE
        if self.shared_audit.pending:
            wait = self._running.worked + settle.AFTER - self._clock()
            return wait if wait > 0 else 0.0 if self.shared_audit.step() else IDLE_SAVE
        if not (self.cache.disk.on or self.cache.store.shared_offer.reading):
            return None if self.expiry.pause == math.inf else self.expiry.pause + IDLE_SAVE
        more = self.cache.store.offload.pending_notices or self.cache.store.shared_offer.later
        return IDLE_SAVE if active and more else min(max(2 * pause, IDLE_SAVE), IDLE_POLL)

    def _preload(self) -> None:
        while self._preloading is not None or not self._preloads.empty():
            if self._preloading is None:
                self._preloading = SharedPreload(self._preloads.get(), self.shared_fetch, lambda: self.expiry.deletion_count)
            if self._preloading.step():
                return
            self._preloading = None

    def _drop_cancelled(self) -> None:
        if gone := [job for job in self.waiting if job.ticket.cancelled or job.ticket.over]:
            self.shared_fetch.end(gone)
            self.waiting = deque(job for job in self.waiting if job not in gone)
        for job in [*gone, *(job for job in self._running if job.ticket.cancelled or job.ticket.over)]:
            if job.ticket.cancelled:
                self._listener.ended(job, "cancelled", self._recording.cancelled(job, exact=self._mode.exact))
            else:
                self._listener.ended(job, "failed")
            self._running.release(job)

    def _abandon(self, error: HeadstartError) -> None:
        """Fails every job, and empties all slots, because the engine's state is unknown. Nothing ends it early."""
        with _going_on("the shared tier"):
            self.shared_fetch.end(self.waiting)
        for job in [*self._running, *self.waiting]:
            job.ticket.emit(Failed(error))
            with _going_on("the listener"):
                self._listener.ended(job, "failed")
            with _going_on("the end of a request"):
                self._running.release(job)
        self._running.jobs.clear()
        self.waiting.clear()
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Ticket):
                item.emit(Failed(error))
            with self._lock:
                self._arriving -= isinstance(item, Ticket)
                self._returning -= isinstance(item, ReturnedTurn)
        self._lost = [*self.slots]
        for slot in self.slots:
            slot.busy = True
            with _going_on("emptying a slot"):
                self._empty(slot)

    def _empty_lost(self) -> None:
        """Empties slots that could not be emptied. As long as that fails, requests fail with it: their KV would be wrong."""
        for slot in [*self._lost]:
            self._empty(slot)

    def _empty(self, lost: Slot) -> None:
        self._admission.empty(lost)
        lost.busy = False
        self._lost.remove(lost)

    # ── admit ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        """Gives free slots to waiting jobs, in order. While replies run, it starts one job at a time: loading KV takes time."""
        for job in list(self.waiting):
            if all(slot.busy for slot in self.slots):
                return
            if job.parked or self._admission.must_wait(job, self._running.jobs):
                continue
            self.expiry.step()  # the job before may have waited long for the disk
            self.waiting.remove(job)
            try:
                self._start(job)
            except Exception as error:
                self._running.fail(job, error)
            if self._running.replying:
                return

    def _start(self, job: Job) -> None:
        hurry = self._stall if self._running.replying else None
        if self._admission.start(job, hurry=hurry):
            self._running.jobs.append(job)
            self.shared_fetch.end([job])
            job.ticket.begun = True
            self._listener.began(job)
            log.debug("%s", job.plan)
        else:
            self._running.release(job)
            self.waiting.appendleft(job)

    def _fetch_late(self) -> None:
        """Takes the slot of a job whose prompt comes from the shared tier after all. Those that wait for it go on waiting."""
        if (job := self._late_fetch.step(self._running.jobs)) is None:
            return
        fetch, job.late = job.late, None
        job.give_back()
        self._running.release(job)
        if fetch is not None:
            self.shared_fetch.wait(job, fetch)
            for other in self.waiting:
                if other.waits_for is not None and other.waits_for[0] is job and not other.parked:
                    self.shared_fetch.follow(other, job)
        self.waiting.appendleft(job)


@contextmanager
def _going_on(what: str) -> Iterator[None]:
    """What comes next is done in any case."""
    try:
        yield
    except Exception:
        log.exception("%s failed", what)
