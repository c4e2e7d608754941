"""Scheduler: the only thread that touches the engine.

    loop:  take in → admit (plan, restore) → one decode call for all running replies → one prefill call for one prompt
    idle:  save what is live → settle finished turns

Prefill and decode never share a call, so neither changes the other's bits. Prompts take turns call by call, each call
sized so that running replies pause for at most the stall target. A request whose prefix is being computed for another one
right now waits for it. Rows are copied out when someone needs them: before a slot is reused, for another request, when idle.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from headstart.errors import EngineError, HeadstartError, Unavailable
from headstart.explain.history import History, NoHistory, RecentHistory
from headstart.interfaces.conversation import Message
from headstart.interfaces.engine import Engine, Step
from headstart.prefix_cache.checkpoints import PLACEMENTS
from headstart.prefix_cache.planner import Mode, next_call
from headstart.prompt.builder import Prompter
from headstart.serving import settle
from headstart.serving.admission import Admission
from headstart.serving.cache import Cache
from headstart.serving.expiry import Expiry
from headstart.serving.job import Job, Ticket, token_logprob
from headstart.serving.request import Failed, Report, StopReason, TokenLogprob
from headstart.serving.slots import Slot

log = logging.getLogger("headstart.scheduler")

IDLE_SAVE = 0.05
"""Seconds without work after which live rows are copied out."""

IDLE_POLL = 1.0
"""Most seconds between two looks at the disk while there is nothing else to do."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished choice, for whoever keeps the statistics."""

    report: Report
    reason: StopReason


class Scheduler:
    """Serves tickets with one engine. `submit` and `cancel` are thread-safe; all else runs on its own thread.

    Args:
        stall: seconds that a prefill call may take while replies are running.
        patience: the same while none is; twice that for a prompt that nobody waits behind.
        settles: whether finished turns are made canonical when there is nothing else to do.
        explains: whether the latest requests are remembered, to explain later ones.
        placement: a row of `PLACEMENTS`.
        observe: told of every finished choice, on the engine thread.
    """

    def __init__(
        self,
        engine: Engine,
        cache: Cache,
        prompter: Prompter,
        mode: Mode,
        *,
        stall: float = 0.25,
        patience: float = 1.0,
        settles: bool = True,
        explains: bool = True,
        placement: str = "lattice",
        observe: Callable[[Outcome], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.cache = cache
        self.slots = [Slot(number, engine.shape, engine.traits.block_size) for number in range(engine.shape.slots)]
        self.history: History = RecentHistory() if explains else NoHistory()
        self.waiting: deque[Job] = deque()
        self._prompter = prompter
        self._mode = mode
        self._stall = stall
        self._patience = patience
        self._observe = observe
        self._clock = clock
        self._inbox: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._erasures: queue.SimpleQueue[tuple[int, Future[int | None]]] = queue.SimpleQueue()
        self._running: list[Job] = []
        self._turn = 0
        self._placement = PLACEMENTS[placement]
        template = prompter.template.source
        self._admission = Admission(engine, cache, self.slots, mode, self._placement, self.history, template, clock)
        self.settle: settle.Settling = settle.NoSettle()
        if settles:
            self.settle = settle.Settle(engine, cache, self.slots, mode, prompter, self._admission, self._placement)
        self.expiry = Expiry(engine, cache, self.slots, prompter, self.settle, self.history, self._admission.empty)
        self._arriving = 0
        self._lock = threading.Lock()  # of _arriving
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="headstart-engine", daemon=True)
        self._thread.start()

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, ticket: Ticket) -> None:
        if self._closed:
            raise Unavailable("The server is stopping.")
        with self._lock:
            self._arriving += 1
        self._inbox.put(ticket)
        if self._closed:  # the loop may have ended without seeing it
            ticket.emit(Failed(Unavailable("The server is stopping.")))

    def wake(self) -> None:
        """Makes an idle loop look at cancelled tickets."""
        self._inbox.put(None)

    def erase(self, number: int) -> Future[int | None]:
        """Forgets what a slot holds; how many tokens that was, or None if it is in use. Runs between two steps."""
        done: Future[int | None] = Future()
        self._erasures.put((number, done))
        self.wake()
        if self._closed:  # the loop may have ended without seeing it
            self._erase()
        return done

    def prefills(self, seconds: float) -> int:
        """About how many tokens are prefilled in so long; 0 as long as nobody knows."""
        return self._admission.pace.tokens(seconds)

    @property
    def pace(self) -> float | None:
        """Measured seconds of prefill a token; None as long as nobody knows."""
        return self._admission.pace.prefill or None

    def close(self) -> None:
        """Fails what is running and waiting, and ends the thread. Idempotent."""
        self._closed = True
        self._inbox.put(None)
        self._thread.join()

    @property
    def running(self) -> int:
        """Choices that hold a slot."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Choices and requests that wait for one."""
        return len(self.waiting) + self._arriving

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        while not self._closed:
            try:
                self._take_in()
                self.cache.store.offload.settle()
                self._drop_cancelled()
                self.expiry.step()
                self._erase()
                self._admit()
                self._decode()
                self._prefill()
                self.cache.saves.secure(self.slots)
            except Exception:  # a fault of ours must not leave callers hanging
                log.exception("the scheduler failed")
                self._abandon(EngineError("internal error; the log says which"))
        try:
            self.cache.saves.flush(self.slots)
        except Exception:
            log.exception("not all that is live could be kept")
        self._abandon(Unavailable("The server is stopping."))

    def _take_in(self) -> None:
        busy = bool(self._running or self.waiting)
        while True:
            try:
                ticket = self._inbox.get_nowait() if busy else self._wait()
            except queue.Empty:
                return
            if ticket is not None:
                self.waiting.extend(Job.all_of(ticket, self.engine, self._clock()))
                with self._lock:
                    self._arriving -= 1
            elif self._closed:
                return
            busy = True

    def _wait(self) -> Ticket | None:
        idle: float | None = IDLE_SAVE
        since = self._clock()
        while True:
            try:
                return self._inbox.get(timeout=idle) if idle is None or idle > 0 else self._inbox.get_nowait()
            except queue.Empty:
                idle = self._idle(since, idle or 0.0)

    def _idle(self, since: float, pause: float) -> float | None:
        """Does what there is to do when nobody waits; how long to sleep then, in seconds, None for until someone comes."""
        active = self.cache.store.offload.settle()
        self.expiry.step()
        if pause:  # not between two calls of settling: a copy for each would be too many
            for slot in self.slots:
                if self._inbox.empty():
                    self.cache.saves.save(slot)
        if self.settle.pending:
            wait = since + settle.AFTER - self._clock()
            return wait if wait > 0 else 0.0 if self.settle.step() else IDLE_SAVE
        if not self.cache.disk.on:
            return None if self.expiry.pause == math.inf else self.expiry.pause + IDLE_SAVE
        return IDLE_SAVE if active and self.cache.store.offload.unsettled else min(max(2 * pause, IDLE_SAVE), IDLE_POLL)

    def _erase(self) -> None:
        while True:
            try:
                number, done = self._erasures.get_nowait()
            except queue.Empty:
                return
            slot = self.slots[number]
            count = None if slot.busy else len(slot)
            if count and not self._closed:
                self._admission.empty(slot)
            done.set_result(count)

    def _drop_cancelled(self) -> None:
        if any(job.ticket.cancelled or job.ticket.over for job in self.waiting):
            self.waiting = deque(job for job in self.waiting if not (job.ticket.cancelled or job.ticket.over))
        for job in [job for job in self._running if job.ticket.cancelled or job.ticket.over]:
            self._release(job)

    def _abandon(self, error: HeadstartError) -> None:
        """Fails every job; the engine's state is unknown, so all slots are emptied."""
        for job in [*self._running, *self.waiting]:
            job.ticket.emit(Failed(error))
            self._release(job)
        self.waiting.clear()
        while True:
            try:
                ticket = self._inbox.get_nowait()
            except queue.Empty:
                break
            if ticket is not None:
                ticket.emit(Failed(error))
                with self._lock:
                    self._arriving -= 1
        for slot in self.slots:
            slot.busy = False
            self._admission.empty(slot)

    # ── admit ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        """Gives free slots to waiting jobs, in order; only one at a time while replies run, since moving rows takes time."""
        for job in list(self.waiting):
            if all(slot.busy for slot in self.slots):
                return
            if self._admission.must_wait(job, self._running):
                continue
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
            job.ticket.begun = True
            log.debug("%s", job.plan)
        else:
            self._release(job)
            self.waiting.appendleft(job)

    # ── decode ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _decode(self) -> None:
        ready = [job for job in self._running if job.token is not None]
        if not ready:
            return
        # Exact mode decodes one by one unless batches were proved to keep the bits: replies then do not depend on neighbours.
        alone = self._mode.exact and not self._mode.any_cut
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
                    job.mark = self.cache.checkpoints.replace(job.slot, job.mark)
            # All are drawn before any is delivered: delivering wakes other threads, and they would compete for this one's time.
            for job, drawn in [(job, self._draw(job)) for job in batch]:
                if drawn is not None:
                    self._accept(job, *drawn)

    def _draw(self, job: Job) -> tuple[int, tuple[TokenLogprob, ...]] | None:
        """The next token of a reply, with its log-probability if asked for; None if the job has failed."""
        assert job.slot is not None
        assert job.sampler is not None
        number, top = job.slot.number, job.request.sampling.logprobs
        logits = self.engine.logits(number) if top is not None else None
        try:
            token = self.engine.sample(number, job.sampler)
        except Exception as error:
            self._fail(job, error, computed=True)
            return None
        return token, (token_logprob(logits, token, top or 0, self.engine),) if logits is not None else ()

    def _accept(self, job: Job, token: int, scored: tuple[TokenLogprob, ...]) -> None:
        """Takes a drawn token into the reply, and ends the reply if it is the last."""
        slot, request, reply = job.slot, job.request, job.reply
        assert slot is not None
        if not job.first:
            job.first = self._clock()
        job.token = token
        limit = request.max_tokens if request.max_tokens is not None else self.engine.shape.ctx
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
        self._turn += 1
        job = jobs[self._turn % len(jobs)]
        slot = job.slot
        assert slot is not None
        alone = len(jobs) == 1 and not self.waiting
        seconds = self._stall if len(jobs) < len(self._running) else self._patience * (2 if alone else 1)
        limit = min(self.engine.shape.batch, self._admission.pace.tokens(seconds))
        start, length = len(slot), len(job.chain)
        size = next_call(start, length, slot.canonical, limit, self.engine.traits, job.points)
        if job.request.prompt_logprobs is not None:
            size = 1
        tokens = job.chain.tokens[start : start + size]
        last = start + size == length
        begun = self._clock()
        try:
            self.engine.prefill(slot.number, tokens, logits=last or job.request.prompt_logprobs is not None)
        except Exception as error:
            self._fail(job, error)
            return
        if size >= self.engine.traits.block_size:
            self._admission.pace.prefilled(self._clock() - begun, size)
            self.cache.store.seconds = self._admission.pace.prefill
        job.computed += size
        slot.extend(tokens, canonical=self._is_canonical(slot, start, size, length))
        if len(slot) in job.points:
            self.cache.checkpoints.take(slot, job.request.prompt.landmarks, protected=len(slot) in job.protected)
        if job.request.prompt_logprobs is not None and not last:
            scores, following = self.engine.logits(slot.number), int(job.chain.tokens[start + 1])
            job.prompt_logprobs.append(token_logprob(scores, following, job.request.prompt_logprobs, self.engine))
        if not last:
            job.progress()
            return
        if any(other.ticket is job.ticket for other in self.waiting):
            # The rows of exactly this prompt, for its other choices. The logits stay until the engine computes.
            self.cache.saves.save(slot, needed=True)
        landmarks = job.request.prompt.landmarks
        kept = (landmarks.anchor, landmarks.turn, *landmarks.breakpoints, *self._admission.shared(slot))
        self.cache.checkpoints.thin(slot, self._placement, kept)
        logits = self.engine.logits(slot.number) if job.request.keep_logits else None
        job.start(job.report(self._mode_name, self._clock()), logits)
        if job.request.max_tokens == 0:
            self._finish(job, "length")
        elif (drawn := self._draw(job)) is not None:
            self._accept(job, *drawn)

    def _is_canonical(self, slot: Slot, start: int, size: int, length: int) -> bool:
        if self._mode.any_cut:
            return True
        block_size = self.engine.traits.block_size
        return start == slot.canonical and start % block_size == 0 and size % block_size == 0 and start + size < length

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _mode_name(self) -> str:
        return "exact" if self._mode.exact else "fast"

    def _finish(self, job: Job, reason: StopReason) -> None:
        report = job.report(self._mode_name, self._clock())
        slot, reply = job.slot, job.reply
        assert slot is not None
        delivered = reply.delivered()
        if reply.stopped_by is not None and self._mode.traits.sliceable and len(slot) > len(job.chain) + len(delivered):
            # The next turn goes on at what the caller saw, not behind the stop text.
            self.engine.truncate(slot.number, len(job.chain) + len(delivered))
            slot.truncate(len(job.chain) + len(delivered))
        if not self.expiry.late(slot):
            self._remember(job, slot, reason)  # before its caller can ask about it
        job.finish(reason, report)
        self._release(job)
        if self._observe is not None:
            try:
                self._observe(Outcome(report, reason))
            except Exception:
                log.exception("an observer failed")

    def _remember(self, job: Job, slot: Slot, reason: StopReason) -> None:
        """Keeps what later requests may want to know of this one."""
        prompt, reply = job.request.prompt, job.reply
        returned = self._returned(job, cut=reason == "length" or reply.stopped_by is not None)
        self.cache.replied(slot, job.request_traits(len(slot.ids), len(reply.tokens), bool(returned.get("tool_calls"))))
        if job.request.choices == 1 and job.request.reuse and reply.tokens:
            self.settle.add(prompt, returned, tuple(slot.ids), slot.now)
        self.history.remember(job.record(returned, self._clock()))
        conversation_fingerprint = self.history.conversation_fingerprint(prompt, self._prompter.template.source)
        if conversation_fingerprint is not None and job.request.reuse:
            self.cache.opened(job.chain, conversation_fingerprint)

    def _returned(self, job: Job, *, cut: bool) -> Message:
        """The message that the caller will send back of a reply; its spelling is remembered, before it can be sent back.

        What a model writes may be anything, and nothing that goes wrong in reading it is worth more than that one spelling.
        """
        prompt, reply = job.request.prompt, job.reply
        said: Message = {"role": "assistant", "content": reply.text}
        try:
            returned = job.request.returns(reply.text, cut) if job.request.returns is not None else said
            for record in self._prompter.remember(prompt, reply.text, reply.delivered(), returned):
                self.cache.keep_reply_tokens(job.chain, record)
        except Exception:
            log.exception("a reply could not be read")
            return said
        return returned

    def _fail(self, job: Job, fault: Exception, *, computed: bool = False) -> None:
        """Something failed for this job: unless all was `computed`, its slot's content is undefined: forgotten, never saved."""
        known = isinstance(fault, HeadstartError)
        # What other code says of a fault may quote another caller's text: neither this one nor the log is told.
        error = fault if isinstance(fault, HeadstartError) else EngineError(f"internal error ({type(fault).__name__})")
        log.error("request failed: %s", error, exc_info=None if known else fault)
        job.ticket.emit(Failed(error))
        slot = job.slot
        self._release(job)
        if slot is not None and not computed:
            self._admission.empty(slot)

    def _release(self, job: Job) -> None:
        if job.sampler is not None:
            job.sampler.close()
            job.sampler = None
        if job.slot is not None:
            job.slot.busy = False
            job.slot.dirty |= not job.slot.kept  # while it was busy its end was left out
            job.slot.last_used = self._clock()
            job.slot = None
        if job in self._running:
            self._running.remove(job)
