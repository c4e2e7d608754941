"""Scheduler: the only thread that touches the engine.

    loop:  take in → admit (plan, restore) → one decode call for all running replies → one prefill call for one prompt

Prefill and decode never share a call, so neither changes the other's bits. Prompts take turns call by call, each call
sized so that running replies pause for at most the stall target. A request whose prefix is being computed for another one
right now waits for it. Rows are copied out when someone needs them: before a slot is reused, for another request, when idle.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from headstart.core.blocks import Tokens, as_tokens, common_prefix
from headstart.core.explain import History, Reason, Record, diverge
from headstart.core.planner import Costs, Mode, Plan, keepable, next_call, plan, restorable
from headstart.core.prompt import Prompter
from headstart.engines.base import Engine, Step
from headstart.errors import EngineError, HeadstartError, Unavailable
from headstart.runtime.cache import Cache
from headstart.runtime.job import Job, Ticket, token_logprob
from headstart.runtime.request import Failed, FinishReason, Report, TokenLogprob
from headstart.runtime.slots import Slot

log = logging.getLogger("headstart.scheduler")

MISSES = 4
"""Bad pieces after which a request stops asking the cache."""

IDLE_SAVE = 0.05
"""Seconds without work after which live rows are copied out."""

IDLE_POLL = 1.0
"""Most seconds between two looks at the disk while there is nothing else to do."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished choice, for whoever keeps the statistics."""

    report: Report
    reason: FinishReason


class Scheduler:
    """Serves tickets with one engine. `submit` and `cancel` are thread-safe; all else runs on its own thread.

    Args:
        stall: seconds that a prefill call may take while replies are running.
        patience: the same while none is.
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
        observe: Callable[[Outcome], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.cache = cache
        self.slots = [Slot(number, engine.shape, engine.traits.grid) for number in range(engine.shape.slots)]
        self.history = History()
        self.waiting: deque[Job] = deque()
        self._prompter = prompter
        self._mode = mode
        self._stall = stall
        self._patience = patience
        self._observe = observe
        self._clock = clock
        self._inbox: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._running: list[Job] = []
        self._turn = 0
        self._prefill_cost = 0.0  # seconds a token; 0 until the first call is measured
        self._restore_cost = 1e-6
        self._arriving = 0
        self._lock = threading.Lock()  # of _arriving
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="headstart-engine", daemon=True)
        self._thread.start()

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, ticket: Ticket) -> None:
        if self._closed:
            raise Unavailable("The server is shutting down.")
        with self._lock:
            self._arriving += 1
        self._inbox.put(ticket)
        if self._closed:  # the loop may have ended without seeing it
            ticket.emit(Failed(Unavailable("The server is shutting down.")))

    def wake(self) -> None:
        """Makes an idle loop look at cancelled tickets."""
        self._inbox.put(None)

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
                self.cache.spill.settle()
                self._drop_cancelled()
                self._admit()
                self._decode()
                self._prefill()
                self.cache.secure(self.slots)
            except Exception as error:  # a fault of ours must not leave callers hanging
                log.exception("the scheduler failed")
                self._abandon(EngineError(f"internal error: {error}"))
        try:
            self.cache.flush(self.slots)
        except Exception:
            log.exception("not all that is live could be kept")
        self._abandon(Unavailable("The server is shutting down."))

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
        try:
            return self._inbox.get(timeout=IDLE_SAVE)
        except queue.Empty:
            for slot in self.slots:
                if self._inbox.empty():
                    self.cache.save(slot)
        pause = IDLE_SAVE
        while self.cache.disk.on:
            try:
                return self._inbox.get(timeout=pause)
            except queue.Empty:
                active = self.cache.spill.settle()
                for slot in self.slots:  # what had to wait for the disk
                    if self._inbox.empty():
                        self.cache.save(slot)
                pause = IDLE_SAVE if active and self.cache.spill.unsettled else min(2 * pause, IDLE_POLL)
        return self._inbox.get()

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
            self._empty(slot)

    # ── admit ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        """Gives free slots to waiting jobs, in order; only one at a time while replies run, since moving rows takes time."""
        for job in list(self.waiting):
            if all(slot.busy for slot in self.slots):
                return
            if self._must_wait(job):
                continue
            self.waiting.remove(job)
            try:
                self._start(job)
            except Exception as error:
                self._fail(job, error)
            if any(other.token is not None for other in self._running):
                return

    def _must_wait(self, job: Job) -> bool:
        """Whether more of the prompt is being computed for another job right now than is available."""
        if not job.request.reuse or not self.engine.traits.sliceable:
            return False
        if job.waits_for is not None:
            other, goal = job.waits_for
            if other.prefilling and other.slot is not None and len(other.slot) < goal:
                return True
            job.waits_for = None
        grid = self.engine.traits.grid
        best = self._available(job)
        for other in self._running:
            if other.prefilling and other.root == job.root and other.request.reuse:
                shared = min(common_prefix(other.chain.tokens, job.chain.tokens), len(job.chain) - 1) // grid * grid
                assert other.slot is not None
                if shared > best and shared > len(other.slot) // grid * grid:
                    job.waits_for = other, shared
                    return True
        return False

    def _available(self, job: Job) -> int:
        """Tokens of the prompt that need not be computed, wherever they are."""
        kept = max(keepable(slot.view(), job.chain, self._mode) for slot in self.slots)
        return max(kept, restorable(self.cache.index, job.chain, self._mode).tokens)

    def _start(self, job: Job) -> None:
        if job.request.reuse:
            self._publish_for(job)
        choice = self._choose(job)
        if any(other.token is not None for other in self._running) and not self.cache.prefetch(choice, self._stall):
            self.waiting.appendleft(job)  # reading goes on after the running replies' next tokens
            return
        job.started = self._clock()
        job.sampler = self.engine.sampler(job.sampling(self.engine))
        job.slot = slot = self.slots[choice.slot]
        slot.busy = True
        if choice.keep < len(slot):
            self.cache.save(slot, spare=choice.restore)
            choice = self._choose(job, only=slot)  # what was saved may have evicted or offered something
        if choice.restore:
            begun = self._clock()
            restored = self.cache.restore(slot, job.chain, choice)
            if restored is not None:
                choice, job.tiers = restored.plan, restored.tiers
                if choice.start:
                    self._restore_cost = _smooth(self._restore_cost, (self._clock() - begun) / choice.start)
                else:
                    self._empty(slot)
                    slot.assign(job.chain, 0, 0)
            else:
                self._empty(slot)
                self._release(job)
                job.misses += 1  # a bad piece is gone from the index: plan again without it
                self.waiting.appendleft(job)
                return
        elif choice.keep:
            if choice.keep < len(slot):
                self.engine.truncate(slot.number, choice.keep)
                slot.truncate(choice.keep)
        else:
            self._empty(slot)
            slot.assign(job.chain, 0, 0)
        self._explain(job, choice.start)
        self.cache.hit(job.chain, choice)
        slot.begin(job.started)
        job.plan = choice
        self._running.append(job)
        log.debug("%s", choice)

    def _choose(self, job: Job, only: Slot | None = None) -> Plan:
        costs = Costs(self._prefill_cost or 1e-3, self._restore_cost)
        slots = [slot.view() for slot in self.slots] if only is None else [replace(only.view(), free=True)]
        reuse = job.request.reuse and job.misses < MISSES
        chosen = plan(job.chain, self.cache.index, slots, costs, self._mode, reuse=reuse)
        assert chosen is not None
        return chosen

    def _publish_for(self, job: Job) -> None:
        """Copies rows out of slots that hold more of the prompt than memory does, unless one of them just goes on."""
        known = restorable(self.cache.index, job.chain, self._mode).tokens
        for slot in self.slots:
            if slot.dirty:
                kept = keepable(slot.view(), job.chain, self._mode)
                if kept > known and (slot.busy or kept < len(slot)):
                    self.cache.save(slot, needed=True)

    def _explain(self, job: Job, start: int) -> None:
        """Finds out why more is computed than an infinite cache would."""
        if not job.request.reuse:
            job.reason = Reason.DISABLED
            return
        prompt = job.request.prompt
        nearest, shared = self.history.nearest(job.root, job.chain.tokens)
        if nearest is None or shared < min(8, len(prompt)):
            if start < self.engine.traits.grid:  # else there are rows that are older than this process
                job.reason = Reason.FINGERPRINT if self.cache.elsewhere(job.chain, prompt.salt) else Reason.COLD
            return
        grid = self.engine.traits.grid
        job.diverged_at = diverge(prompt, nearest.text)
        if min(shared, len(prompt) - 1) - start >= grid + 8:
            if not self._mode.traits.sliceable:
                job.reason = Reason.STATE
            elif self._mode.exact and start >= nearest.canonical // grid * grid:
                job.reason = Reason.DERIVED
            else:
                job.reason = Reason.EVICTED
        elif job.diverged_at is not None:
            job.reason = Reason.DIVERGED

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
            # All are drawn before any is delivered: delivering wakes other threads, and they would compete for this one's time.
            for job, token, scored in [(job, *self._draw(job)) for job in batch]:
                self._accept(job, token, scored)

    def _draw(self, job: Job) -> tuple[int, tuple[TokenLogprob, ...]]:
        """The next token of a reply, with its log-probability if asked for."""
        assert job.slot is not None
        assert job.sampler is not None
        number, top = job.slot.number, job.request.sampling.logprobs
        logits = self.engine.logits(number) if top is not None else None
        token = self.engine.sample(number, job.sampler)
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
        seconds = self._stall if len(jobs) < len(self._running) else self._patience
        limit = min(self.engine.shape.batch, int(seconds / self._prefill_cost) if self._prefill_cost else 0)
        start, length = len(slot), len(job.chain)
        size = next_call(start, length, slot.canonical, limit, self.engine.traits)
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
        if size >= self.engine.traits.grid:
            cost = (self._clock() - begun) / size
            self._prefill_cost = _smooth(self._prefill_cost, cost) if self._prefill_cost else cost
            self.cache.seconds = self._prefill_cost
        job.computed += size
        slot.extend(tokens, canonical=self._is_canonical(slot, start, size, length))
        if job.request.prompt_logprobs is not None and not last:
            scores, following = self.engine.logits(slot.number), int(job.chain.tokens[start + 1])
            job.prompt_logprobs.append(token_logprob(scores, following, job.request.prompt_logprobs, self.engine))
        if not last:
            job.progress()
            return
        if any(other.ticket is job.ticket for other in self.waiting):
            # The rows of exactly this prompt, for its other choices. The logits stay until the engine computes.
            self.cache.save(slot, needed=True)
        logits = self.engine.logits(slot.number) if job.request.keep_logits else None
        job.start(job.report(self._mode_name, self._clock()), logits)
        if job.request.max_tokens == 0:
            self._finish(job, "length")
        else:
            self._accept(job, *self._draw(job))

    def _is_canonical(self, slot: Slot, start: int, size: int, length: int) -> bool:
        if self._mode.any_cut:
            return True
        grid = self.engine.traits.grid
        return start == slot.canonical and start % grid == 0 and size % grid == 0 and start + size < length

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _mode_name(self) -> str:
        return "exact" if self._mode.exact else "fast"

    def _finish(self, job: Job, reason: FinishReason) -> None:
        report = job.report(self._mode_name, self._clock())
        slot, prompt, reply = job.slot, job.request.prompt, job.reply
        assert slot is not None
        delivered = reply.delivered()
        if reply.stopped_by is not None and self._mode.traits.sliceable and len(slot) > len(job.chain) + len(delivered):
            # The next turn goes on at what the caller saw, not behind the stop text.
            self.engine.truncate(slot.number, len(job.chain) + len(delivered))
            slot.truncate(len(job.chain) + len(delivered))
        spelled = self._prompter.remember(prompt, reply.text, delivered)  # before the caller can send it back
        if spelled is not None:
            self.cache.spelled(job.chain, spelled)
        self.cache.replied(slot, len(reply.tokens))
        job.finish(reason, report)
        self._release(job)
        self.history.remember(Record(job.root, prompt.text + reply.text, _joined(job), slot.canonical))
        if self._observe is not None:
            try:
                self._observe(Outcome(report, reason))
            except Exception:
                log.exception("an observer failed")

    def _fail(self, job: Job, fault: Exception) -> None:
        """Something failed for this job: its slot's content is undefined, so it is forgotten, never saved."""
        error = fault if isinstance(fault, HeadstartError) else EngineError(f"internal error: {fault!r}")
        log.error("request failed: %s", error)
        job.ticket.emit(Failed(error))
        slot = job.slot
        self._release(job)
        if slot is not None:
            self._empty(slot)

    def _release(self, job: Job) -> None:
        if job.sampler is not None:
            job.sampler.close()
            job.sampler = None
        if job.slot is not None:
            job.slot.busy = False
            job.slot.last_used = self._clock()
            job.slot = None
        if job in self._running:
            self._running.remove(job)

    def _empty(self, slot: Slot) -> None:
        self.engine.truncate(slot.number, 0)
        slot.truncate(0)
        slot.dirty = False


def _smooth(old: float, new: float) -> float:
    return 0.7 * old + 0.3 * new


def _joined(job: Job) -> Tokens:
    return as_tokens([*job.chain.tokens.tolist(), *job.reply.tokens])
