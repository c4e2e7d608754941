"""Scheduler: runs the engine, on the engine thread.

    loop:  take in → notices of tiers → cancel → fetch → expire → admit (plan, restore) → one token for each running reply
           → one prefill call for one prompt → save
    idle:  save what is live → settle finished turns

Prefill and decode never share a call, so neither changes the other's bits. Of the prompts in slots the one with the least left
gets the next call; the time that a prompt has waited counts too, so that none waits for ever. The size of a call is such that
running replies pause for at most the stall target.
A request waits if another one is computing its prefix. KV is saved before a slot is reused, when another request needs it, and
when the engine is idle.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from headstart.errors import EngineError, HeadstartError, Unavailable
from headstart.explain.history import History, NoHistory, RecentHistory
from headstart.interfaces.engine import Step
from headstart.prefix_cache.planner import Mode, canonical_part, next_call
from headstart.prompt.builder import Prompter
from headstart.serving import settle
from headstart.serving.admission import Admission
from headstart.serving.cache import Cache
from headstart.serving.engine_thread import EngineThread
from headstart.serving.expiry import Expiry
from headstart.serving.gate import OwnProcess
from headstart.serving.job import Job, Ticket, token_logprob
from headstart.serving.late_fetch import LateFetch
from headstart.serving.portions import LongWork, Portions
from headstart.serving.request import Failed, Report, StopReason, TokenLogprob
from headstart.serving.shared_audit import SharedAudit
from headstart.serving.shared_fetch import SharedFetch
from headstart.serving.shared_preload import Preload, SharedPreload
from headstart.serving.slots import Slot
from headstart.serving.turn import ReturnedTurn, Turn

log = logging.getLogger("headstart.scheduler")

T = TypeVar("T")

AGEING = 0.1
"""Seconds of prefill that each second of waiting counts. A prompt of one minute is overtaken by prompts that arrive within ten
minutes after it, and by no later ones."""

FIRST_PACE = 1e-3
"""Seconds of prefill per token that are assumed before the first call."""

IDLE_SAVE = 0.05
"""Seconds without work after which live KV is saved."""

PARKED = 0.05
"""Most seconds between two looks at the shared tier while every request waits for it. What arrives wakes the loop at once."""

IDLE_POLL = 1.0
"""Most seconds between two reads of the disk's notices while the engine is idle."""

INTERNAL = "internal error; the log says which"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished choice, for statistics."""

    report: Report
    reason: StopReason


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
        self._prompter = prompter
        self._mode = mode
        self._stall = stall
        self.patience = patience
        self._observe = observe
        self._clock = clock
        self._inbox: queue.SimpleQueue[Ticket | ReturnedTurn | None] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.portions = Portions(clock)
        self._preloads: queue.SimpleQueue[Preload] = queue.SimpleQueue()
        self._preloading: SharedPreload | None = None
        self._running: list[Job] = []
        self._lost: list[Slot] = []  # what the engine holds in them is not known; they are busy
        template = prompter.template.source
        self._listener = cache.store.listener
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
            wipes=lambda: self.expiry.wipes,
            wake=self.wake,
        )
        self._late_fetch = LateFetch(self.shared_fetch, self._admission, clock)
        self.expiry = Expiry(
            *(engine, cache, self.slots, prompter, self.settle, self.shared_audit, self.history),
            *(self._admission.empty, self.shared_fetch.unpin, self.portions),
        )
        self._arriving = 0
        self._returning = 0
        self._unanswered = 0  # calls since the end of the loop, until they are answered
        self._lock = threading.Lock()  # of these three
        self._closed = False
        self.process = OwnProcess()
        self._settle_until = -math.inf
        self._worked = self._idled = clock()  # the last end of a request or returned turn; the last idle work
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
        self.process.check()
        done: Future[T] = Future()

        def answer() -> None:
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self._calls.put(answer)
        self._called()
        return done

    def carry_out(self, work: LongWork[T]) -> Future[T]:
        """Does long work on the engine thread, in pieces between its steps. Raises Unavailable in a forked process."""
        self.process.check()
        done = self.portions.add(work)
        self._called()
        return done

    def _called(self) -> None:
        self.wake()
        if self._closed:  # the loop may have ended without seeing it; as long as it runs, nothing may change under it
            self._ended.add_done_callback(lambda _: self._answer_after_the_end())

    def _answer_after_the_end(self) -> None:
        """Does what was called when the loop had ended. One thread does it for all who call meanwhile."""
        with self._lock:
            self._unanswered += 1
            if self._unanswered > 1:
                return
        while True:
            answered = self._unanswered
            self._answer_calls()
            self.portions.finish()
            with self._lock:
                if answered == self._unanswered:
                    self._unanswered = 0
                    return

    def preload(self, preload: Preload) -> None:
        """Begins a preload, after those that began before. Raises Unavailable in a forked process."""
        self.process.check()
        self._preloads.put(preload)
        self.wake()
        if self._closed:  # the loop may have ended without seeing it
            preload.over.set()

    def prefills(self, seconds: float) -> int:
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
        return list(self._running)

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
                self._answer_calls()
                self.portions.step()
                if self.waiting:
                    self._empty_lost()
                self._admit()
                self._decode()
                self._prefill()
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
        self._answer_calls()  # whoever called before `close` has left it to this loop to answer
        self.portions.finish()
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
            self._listener.stepped(self.slots, self._running, self.waiting)
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
                self._worked = self._clock()
                try:
                    self._keep(item)
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
            left = None if idle is None else max(self._worked, self._idled) + idle - self._clock()
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
        if self.settle.pending:
            wait = self._worked + settle.AFTER - self._clock()
            return wait if wait > 0 else 0.0 if self.settle.step() else IDLE_SAVE
        if self.shared_audit.pending:
            wait = self._worked + settle.AFTER - self._clock()
            return wait if wait > 0 else 0.0 if self.shared_audit.step() else IDLE_SAVE
        if not (self.cache.disk.on or self.cache.store.shared_offer.reading):
            return None if self.expiry.pause == math.inf else self.expiry.pause + IDLE_SAVE
        more = self.cache.store.offload.pending_notices or self.cache.store.shared_offer.later
        return IDLE_SAVE if active and more else min(max(2 * pause, IDLE_SAVE), IDLE_POLL)

    def _preload(self) -> None:
        while self._preloading is not None or not self._preloads.empty():
            if self._preloading is None:
                self._preloading = SharedPreload(self._preloads.get(), self.shared_fetch, lambda: self.expiry.wipes)
            if self._preloading.step():
                return
            self._preloading = None

    def _answer_calls(self) -> None:
        while True:
            try:
                answer = self._calls.get_nowait()
            except queue.Empty:
                return
            answer()

    def _drop_cancelled(self) -> None:
        if gone := [job for job in self.waiting if job.ticket.cancelled or job.ticket.over]:
            self.shared_fetch.end(gone)
            self.waiting = deque(job for job in self.waiting if job not in gone)
        for job in [*gone, *(job for job in self._running if job.ticket.cancelled or job.ticket.over)]:
            if job.ticket.cancelled:
                self._listener.ended(job, "cancelled", self._cancelled(job))
            else:
                self._listener.ended(job, "failed")
            self._release(job)

    def _cancelled(self, job: Job) -> Report | None:
        """Remembers a cancelled job, so that it can be explained; None if it never had a slot, because nothing was planned."""
        if job.slot is None:
            return None
        now = self._clock()
        report = job.ticket.reports[job.choice] = replace(job.report(self._mode_name, now), cancelled=True)
        if not self.expiry.late(job.slot, job.ticket.reports):
            self.history.remember(job.turn(now, self.expiry.wipes, settles=False).record)
        return report

    def _abandon(self, error: HeadstartError) -> None:
        """Fails every job, and empties all slots, because the engine's state is unknown. Nothing ends it early."""
        with _going_on("the shared tier"):
            self.shared_fetch.end(self.waiting)
        for job in [*self._running, *self.waiting]:
            job.ticket.emit(Failed(error))
            with _going_on("the listener"):
                self._listener.ended(job, "failed")
            with _going_on("the end of a request"):
                self._release(job)
        self._running.clear()
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
            if job.parked or self._admission.must_wait(job, self._running):
                continue
            self.expiry.step()  # the job before may have waited long for the disk
            self.waiting.remove(job)
            try:
                self._start(job)
            except Exception as error:
                self._fail(job, error)
            if any(other.token is not None for other in self._running):
                return

    def _start(self, job: Job) -> None:
        hurry = self._stall if any(other.token is not None for other in self._running) else None
        if self._admission.start(job, hurry=hurry):
            self._running.append(job)
            self.shared_fetch.end([job])
            job.ticket.begun = True
            self._listener.began(job)
            log.debug("%s", job.plan)
        else:
            self._release(job)
            self.waiting.appendleft(job)

    def _fetch_late(self) -> None:
        """Takes the slot of a job whose prompt comes from the shared tier after all. Those that wait for it go on waiting."""
        if (job := self._late_fetch.step(self._running)) is None:
            return
        fetch, job.late = job.late, None
        job.give_back()
        self._release(job)
        if fetch is not None:
            self.shared_fetch.wait(job, fetch)
            for other in self.waiting:
                if other.waits_for is not None and other.waits_for[0] is job and not other.parked:
                    self.shared_fetch.follow(other, job)
        self.waiting.appendleft(job)

    # ── decode ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _decode(self) -> None:
        ready = [job for job in self._running if job.token is not None]
        if not ready:
            return
        # In exact mode, replies must not depend on each other. They share a call only if that was proved to keep the bits.
        alone = self._mode.exact and not self._mode.any_cut
        begun = self._clock()
        for batch in ([job] for job in ready) if alone else [ready]:
            steps = [Step(job.slot.number, job.token) for job in batch if job.slot and job.token is not None]
            try:
                self.engine.decode(steps)
            except Exception as error:
                for job in batch:
                    self._fail(job, error)
                continue
            for job in batch:
                assert job.slot is not None
                assert job.token is not None
                job.slot.append(job.token, canonical=self._mode.any_cut)
                if len(job.slot) % self.engine.traits.block_size == 0:
                    job.last_checkpoint = self.cache.checkpoints.replace(job.slot, job.last_checkpoint)
            # All tokens are drawn before any is delivered, because delivering wakes threads that then compete for the CPU.
            for job, drawn in [(job, self._draw(job)) for job in batch]:
                if drawn is not None:
                    self._accept(job, *drawn)
        self._listener.decoded(len(ready), self._clock() - begun)

    def _draw(self, job: Job) -> tuple[int, tuple[TokenLogprob, ...]] | None:
        """The next token of a reply, with its log-probability if requested. None if the job has failed."""
        assert job.slot is not None
        assert job.sampler is not None
        number, top = job.slot.number, job.request.params.sampling.logprobs
        try:
            logits = self.engine.logits(number) if top is not None else None
            token = self.engine.sample(number, job.sampler)
            scored = (token_logprob(logits, token, top or 0, self.engine),) if logits is not None else ()
        except Exception as error:
            self._fail(job, error, computed=True)
            return None
        return token, scored

    def _accept(self, job: Job, token: int, scored: tuple[TokenLogprob, ...]) -> None:
        """Appends a drawn token to the reply, and ends the reply if it is the last one."""
        slot, request, reply = job.slot, job.request, job.reply
        assert slot is not None
        if not job.first:
            job.first = self._clock()
        job.token = token
        limit = request.params.max_tokens if request.params.max_tokens is not None else self.engine.shape.ctx
        if token in self.engine.tokenizer.eog:
            job.deliver(reply.end(token))
            self._finish(job, "stop")
            return
        job.deliver(reply.push(token), scored)
        if reply.stopped_by is not None:
            self._finish(job, "stop")
        elif len(reply.tokens) >= limit or len(slot) >= self.engine.shape.ctx:
            job.deliver(reply.end())
            self._finish(job, "stop" if reply.stopped_by is not None else "length")

    # ── prefill ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prefill(self) -> None:
        jobs = [job for job in self._running if job.prefilling]
        if not jobs:
            return
        job = self._next_prefill(jobs)
        slot = job.slot
        assert slot is not None
        alone = len(jobs) == 1 and not self.waiting
        seconds = self._stall if len(jobs) < len(self._running) else self.patience * (2 if alone else 1)
        limit = min(self.engine.shape.batch, self._admission.pace.tokens(seconds))
        start, length = len(slot), len(job.chain)
        size = next_call(start, length, slot.canonical, limit, self.engine.traits, job.points, self.engine.fills_block)
        if job.request.prompt_logprobs is not None:
            size = 1
        tokens = job.chain.tokens[start : start + size]
        last = start + size == length
        scored = job.request.prompt_logprobs if not last else None
        begun = self._clock()
        try:
            self.engine.prefill(slot.number, tokens, logits=last or scored is not None)
            kept = scored is not None or (last and job.request.keep_logits)
            logits = self.engine.logits(slot.number) if kept else None
        except Exception as error:
            self._fail(job, error)
            return
        traits = self.engine.traits
        blocks = canonical_part(start, size, length, slot.canonical, traits)
        if size >= traits.block_size:
            seconds = self._clock() - begun
            filled = blocks + traits.block_size if 0 < blocks < size else size  # a tail behind blocks fills one
            self._admission.pace.prefilled(seconds, filled)
            self._listener.prefilled(start, start + filled, seconds)
            self.cache.store.seconds = self._admission.pace.prefill
        job.prefilled = job.prefilled[0] if job.computed else begun, self._clock()
        job.computed += size
        canonical = size if self._mode.any_cut else blocks
        if canonical:
            slot.extend(tokens[:canonical], canonical=True)
        if canonical < size:
            slot.extend(tokens[canonical:], canonical=False)
        if len(slot) in job.points:
            self.cache.checkpoints.take(slot, job.request.prompt.landmarks, protected=len(slot) in job.protected)
        if scored is not None and logits is not None:
            job.prompt_logprobs.append(token_logprob(logits, int(job.chain.tokens[start + 1]), scored, self.engine))
        if not last:
            job.progress()
            return
        if any(other.ticket is job.ticket for other in self.waiting):
            # The other choices need the KV of exactly this prompt. The logits stay valid until the engine computes again.
            self.cache.kv_save.save(slot, needed=True)
        landmarks = job.request.prompt.landmarks
        self.cache.checkpoints.thin(slot, (*landmarks, *self._admission.shared(slot)))
        report = job.report(self._mode_name, self._clock())
        job.start(report, logits)
        self._listener.replying(job, report)
        if job.request.params.reuse:
            self.cache.kv_save.computed(slot)
        if job.request.params.max_tokens == 0:
            self._finish(job, "length")
        elif (drawn := self._draw(job)) is not None:
            self._accept(job, *drawn)

    def _next_prefill(self, jobs: Sequence[Job]) -> Job:
        """The prompt with the least left. Waiting counts too."""
        pace = self._admission.pace.prefill or FIRST_PACE

        def left(job: Job) -> float:
            return (len(job.chain) - (len(job.slot) if job.slot else 0)) * pace + AGEING * job.arrived

        return min(jobs, key=left)

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _mode_name(self) -> str:
        return "exact" if self._mode.exact else "fast"

    def _finish(self, job: Job, reason: StopReason) -> None:
        report = job.report(self._mode_name, self._clock())
        slot = job.slot
        assert slot is not None
        whole = job.reply.stopped_by is None or self._cut(job, slot)
        job.finish(reason, report, self._turn_of(job, slot))
        self._listener.ended(job, reason, report)
        self._release(job)
        self._notify(Outcome(report, reason))
        if not whole:
            self._admission.empty(slot)

    def _cut(self, job: Job, slot: Slot) -> bool:
        """Truncates the slot after the last token that the caller has seen, because the next turn continues there.

        False if that fails: the reply is complete, but what the slot holds is undefined.
        """
        seen = len(job.chain) + len(job.reply.delivered())
        if self._mode.traits.sliceable and len(slot) > seen:
            try:
                self.engine.truncate(slot.number, seen)
            except EngineError as error:
                log.warning("slot %d is emptied: %s", slot.number, error)
                return False
            slot.truncate(seen)
        return True

    def _turn_of(self, job: Job, slot: Slot) -> Turn | None:
        """The turn for `Runtime.remember`; None if it must leave no record."""
        if self.expiry.late(slot, job.ticket.reports):
            return None
        prompt = job.request.prompt
        turn = job.turn(self._clock(), self.expiry.wipes, settles=self.settle.takes(prompt))
        slot.request_traits = turn.request_traits()
        self.history.remember(turn.record)  # before the caller can ask for an explanation
        conversation_fingerprint = self.history.conversation_fingerprint(prompt, self._prompter.template.source)
        if conversation_fingerprint is not None and job.request.params.reuse:
            self.cache.opened(job.chain, conversation_fingerprint)
        return turn

    def _keep(self, returned: ReturnedTurn) -> None:
        """Records a returned turn."""
        turn = returned.turn
        if self.expiry.passed(turn):
            return
        traits = turn.request_traits(bool(returned.message.get("tool_calls")))
        for slot in self.slots:
            if tuple(slot.ids) == turn.ids:
                slot.request_traits = traits
        self.cache.replied(turn.ids, traits)
        for record in returned.learned:
            self.cache.keep_reply_tokens(turn.chain, record)
        self.history.returned(turn.record, returned.message)
        self.settle.add(returned)

    def _notify(self, outcome: Outcome) -> None:
        if self._observe is not None:
            try:
                self._observe(outcome)
            except Exception:
                log.exception("an observer failed")

    def _fail(self, job: Job, fault: Exception, *, computed: bool = False) -> None:
        """Fails a job. Unless the call was `computed`, the content of its slot is undefined, so the slot is emptied."""
        known = isinstance(fault, HeadstartError)
        # The message of any other exception may quote the text of another caller, so it is not passed on.
        error = fault if isinstance(fault, HeadstartError) else EngineError(f"internal error ({type(fault).__name__})")
        log.error("request failed: %s", error, exc_info=None if known else fault)
        job.ticket.emit(Failed(error))
        slot = job.slot
        self.shared_fetch.end([job])
        self._listener.ended(job, "failed")
        self._release(job)
        if slot is not None and not computed:
            self._admission.empty(slot)

    def _release(self, job: Job) -> None:
        if job.sampler is not None:
            job.sampler.close()
            job.sampler = None
        self._late_fetch.end(job)
        if job.slot is not None:
            job.slot.dirty |= not job.slot.kept  # while it was busy, its end was not saved
            job.slot.busy = False
            job.slot.last_used = self._clock()
            job.slot = None
        self._worked = self._clock()
        if job in self._running:
            self._running.remove(job)


@contextmanager
def _going_on(what: str) -> Iterator[None]:
    """What comes next is done in any case."""
    try:
        yield
    except Exception:
        log.exception("%s failed", what)
