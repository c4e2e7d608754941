"""Prefill: computes the prompts in slots, a call at a time. Used from the engine thread only.

The prompt with the least left gets the next call; the time that a prompt has waited counts too, so that none waits for ever.
The size of a call is such that running replies pause for at most the stall target.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from headstart.interfaces.engine import Engine, Logits
from headstart.prefix_cache.planner import Mode, canonical_part, next_call
from headstart.serving.admission import Admission
from headstart.serving.cache import Cache
from headstart.serving.decode import Decode
from headstart.serving.job import Job, token_logprob
from headstart.serving.listener import Listener
from headstart.serving.running_jobs import RunningJobs
from headstart.serving.slots import Slot

AGEING = 0.1
"""Seconds of prefill that each second of waiting counts. A prompt of one minute is overtaken by prompts that arrive within ten
minutes after it, and by no later ones."""

FIRST_PACE = 1e-3
"""Seconds of prefill per token that are assumed before the first call."""


class Prefill:
    """Computes prompts, and lets their replies begin.

    Args:
        stall: seconds that a call may take while replies are running.

    Attributes:
        patience: the same while no reply is running. It is doubled for a prompt that no other request waits behind.
    """

    def __init__(
        self,
        engine: Engine,
        cache: Cache,
        admission: Admission,
        running: RunningJobs,
        decode: Decode,
        listener: Listener,
        mode: Mode,
        *,
        stall: float,
        patience: float,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._admission = admission
        self._running = running
        self._decode = decode
        self._listener = listener
        self._mode = mode
        self._stall = stall
        self.patience = patience
        self._clock = clock

    def step(self, waiting: Collection[Job]) -> None:
        """Makes one call for one prompt. `waiting`: the jobs that wait for a slot."""
        jobs = [job for job in self._running if job.prefilling]
        if not jobs:
            return
        job = self._next(jobs)
        slot = job.slot
        assert slot is not None
        alone = len(jobs) == 1 and not waiting
        seconds = self._stall if len(jobs) < len(self._running) else self.patience * (2 if alone else 1)
        limit = min(self._engine.shape.batch, self._admission.pace.tokens(seconds))
        start, length, traits = len(slot), len(job.chain), self._engine.traits
        size = next_call(start, length, slot.canonical, limit, traits, job.points, self._engine.fills_block)
        if job.request.prompt_logprobs is not None:
            size = 1
        tokens = job.chain.tokens[start : start + size]
        last = start + size == length
        scored = job.request.prompt_logprobs if not last else None
        begun = self._clock()
        try:
            self._engine.prefill(slot.number, tokens, logits=last or scored is not None)
            kept = scored is not None or (last and job.request.keep_logits)
            logits = self._engine.logits(slot.number) if kept else None
        except Exception as error:
            self._running.fail(job, error)
            return
        blocks = canonical_part(start, size, length, slot.canonical, traits)
        if size >= traits.block_size:
            seconds = self._clock() - begun
            filled = blocks + traits.block_size if 0 < blocks < size else size  # a tail behind blocks fills one
            self._admission.pace.prefilled(seconds, filled)
            self._listener.prefilled(start, start + filled, seconds)
            self._cache.store.seconds = self._admission.pace.prefill
        job.prefilled = job.prefilled[0] if job.computed else begun, self._clock()
        job.computed += size
        canonical = size if self._mode.any_cut else blocks
        if canonical:
            slot.extend(tokens[:canonical], canonical=True)
        if canonical < size:
            slot.extend(tokens[canonical:], canonical=False)
        if len(slot) in job.points:
            self._cache.checkpoints.take(slot, job.request.prompt.landmarks, protected=len(slot) in job.protected)
        if scored is not None and logits is not None:
            job.prompt_logprobs.append(token_logprob(logits, int(job.chain.tokens[start + 1]), scored, self._engine))
        if not last:
            job.progress()
            return
        self._complete(job, slot, logits, waiting)

    def _complete(self, job: Job, slot: Slot, logits: Logits | None, waiting: Collection[Job]) -> None:
        """Begins the reply of a job whose prompt is computed."""
        if any(other.ticket is job.ticket for other in waiting):
            # The other choices need the KV of exactly this prompt. The logits stay valid until the engine computes again.
            self._cache.kv_save.save(slot, needed=True)
        landmarks = job.request.prompt.landmarks
        self._cache.checkpoints.thin(slot, (*landmarks, *self._admission.shared(slot)))
        report = self._running.report(job)
        job.start(report, logits)
        self._listener.replying(job, report)
        if job.request.params.reuse:
            self._cache.kv_save.computed(slot)
        if job.request.params.max_tokens == 0:
            self._running.finish(job, "length")
        else:
            self._decode.first(job)

    def _next(self, jobs: Sequence[Job]) -> Job:
        """The prompt with the least left. Waiting counts too."""
        pace = self._admission.pace.prefill or FIRST_PACE

        def left(job: Job) -> float:
            return (len(job.chain) - (len(job.slot) if job.slot else 0)) * pace + AGEING * job.arrived

        return min(jobs, key=left)
