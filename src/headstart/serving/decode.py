"""Decode: one more token for each running reply. Used from the engine thread only."""

from __future__ import annotations

from collections.abc import Callable

from headstart.interfaces.engine import Engine, Step
from headstart.prefix_cache.planner import Mode
from headstart.serving.cache import Cache
from headstart.serving.job import Job, token_logprob
from headstart.serving.listener import Listener
from headstart.serving.request import TokenLogprob
from headstart.serving.running_jobs import RunningJobs


class Decode:
    """Computes and draws the tokens of replies. It ends a reply at its last token."""

    def __init__(
        self, engine: Engine, cache: Cache, running: RunningJobs, listener: Listener, mode: Mode, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._running = running
        self._listener = listener
        self._mode = mode
        self._clock = clock

    def step(self) -> None:
        """Computes the last token of each reply, and draws the next one."""
        ready = [job for job in self._running if job.token is not None]
        if not ready:
            return
        # In exact mode, replies must not depend on each other. They share a call only if that was proved to keep the bits.
        alone = self._mode.exact and not self._mode.any_cut
        begun = self._clock()
        for batch in ([job] for job in ready) if alone else [ready]:
            steps = [Step(job.slot.number, job.token) for job in batch if job.slot and job.token is not None]
            try:
                self._engine.decode(steps)
            except Exception as error:
                for job in batch:
                    self._running.fail(job, error)
                continue
            for job in batch:
                assert job.slot is not None
                assert job.token is not None
                job.slot.append(job.token, canonical=self._mode.any_cut)
                if len(job.slot) % self._engine.traits.block_size == 0:
                    job.last_checkpoint = self._cache.checkpoints.replace(job.slot, job.last_checkpoint)
            # All tokens are drawn before any is delivered, because delivering wakes threads that then compete for the CPU.
            for job, drawn in [(job, self._draw(job)) for job in batch]:
                if drawn is not None:
                    self._accept(job, *drawn)
        self._listener.decoded(len(ready), self._clock() - begun)

    def first(self, job: Job) -> None:
        """Draws the first token of a reply, from the logits of its prompt."""
        if (drawn := self._draw(job)) is not None:
            self._accept(job, *drawn)

    def _draw(self, job: Job) -> tuple[int, tuple[TokenLogprob, ...]] | None:
        """The next token of a reply, with its log-probability if requested. None if the job has failed."""
        assert job.slot is not None
        assert job.sampler is not None
        number, top = job.slot.number, job.request.params.sampling.logprobs
        try:
            logits = self._engine.logits(number) if top is not None else None
            token = self._engine.sample(number, job.sampler)
            scored = (token_logprob(logits, token, top or 0, self._engine),) if logits is not None else ()
        except Exception as error:
            self._running.fail(job, error, computed=True)
            return None
        return token, scored

    def _accept(self, job: Job, token: int, scored: tuple[TokenLogprob, ...]) -> None:
        """Appends a drawn token to the reply, and ends the reply if it is the last one."""
        slot, request, reply = job.slot, job.request, job.reply
        assert slot is not None
        if not job.first:
            job.first = self._clock()
        job.token = token
        limit = request.params.max_tokens if request.params.max_tokens is not None else self._engine.shape.ctx
        if token in self._engine.tokenizer.eog:
            job.deliver(reply.end(token))
            self._running.finish(job, "stop")
            return
        job.deliver(reply.push(token), scored)
        if reply.stopped_by is not None:
            self._running.finish(job, "stop")
        elif len(reply.tokens) >= limit or len(slot) >= self._engine.shape.ctx:
            job.deliver(reply.end())
            self._running.finish(job, "stop" if reply.stopped_by is not None else "length")
