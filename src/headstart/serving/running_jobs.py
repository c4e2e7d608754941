"""Running jobs: the choices that have a slot, and how they leave it: with a whole reply, with an error, or to wait once more.

Used from the engine thread only. Any thread may read `len` and `jobs`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headstart.errors import EngineError, HeadstartError
from headstart.interfaces.engine import Engine
from headstart.prefix_cache.planner import Mode
from headstart.serving.admission import Admission
from headstart.serving.job import Job
from headstart.serving.late_fetch import LateFetch
from headstart.serving.listener import Listener
from headstart.serving.recording import Recording
from headstart.serving.request import Failed, Report, StopReason
from headstart.serving.shared_fetch import SharedFetch
from headstart.serving.slots import Slot

log = logging.getLogger("headstart.scheduler")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished choice, for statistics."""

    report: Report
    reason: StopReason


class RunningJobs:
    """The jobs that have a slot.

    Args:
        observe: called with every finished choice.

    Attributes:
        jobs: in the order in which they began. The scheduler adds to the list.
        worked: when a request or a returned turn ended last.
    """

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        shared_fetch: SharedFetch,
        late_fetch: LateFetch,
        recording: Recording,
        listener: Listener,
        *,
        mode: Mode,
        observe: Callable[[Outcome], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._shared_fetch = shared_fetch
        self._late_fetch = late_fetch
        self._recording = recording
        self._listener = listener
        self._mode = mode
        self._observe = observe
        self._clock = clock
        self.jobs: list[Job] = []
        self.worked = clock()

    def __len__(self) -> int:
        return len(self.jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    @property
    def replying(self) -> bool:
        """Whether a reply is being decoded."""
        return any(job.token is not None for job in self.jobs)

    def report(self, job: Job) -> Report:
        """What a job has computed so far."""
        return job.report(exact=self._mode.exact, now=self._clock())

    def finish(self, job: Job, reason: StopReason) -> None:
        """Ends a whole reply."""
        report = self.report(job)
        slot = job.slot
        assert slot is not None
        whole = job.reply.stopped_by is None or self._cut(job, slot)
        job.finish(reason, report, self._recording.finished(job, slot))
        self._listener.ended(job, reason, report)
        self.release(job)
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
                self._engine.truncate(slot.number, seen)
            except EngineError as error:
                log.warning("slot %d is emptied: %s", slot.number, error)
                return False
            slot.truncate(seen)
        return True

    def _notify(self, outcome: Outcome) -> None:
        if self._observe is not None:
            try:
                self._observe(outcome)
            except Exception:
                log.exception("an observer failed")

    def fail(self, job: Job, fault: Exception, *, computed: bool = False) -> None:
        """Fails a job. Unless the call was `computed`, the content of its slot is undefined, so the slot is emptied."""
        known = isinstance(fault, HeadstartError)
        # The message of any other exception may quote the text of another caller, so it is not passed on.
        error = fault if isinstance(fault, HeadstartError) else EngineError(f"internal error ({type(fault).__name__})")
        log.error("request failed: %s", error, exc_info=None if known else fault)
        job.ticket.emit(Failed(error))
        slot = job.slot
        self._shared_fetch.end([job])
        self._listener.ended(job, "failed")
        self.release(job)
        if slot is not None and not computed:
            self._admission.empty(slot)

    def release(self, job: Job) -> None:
        """Frees the slot of a job, if it has one, its sampler and its late fetch. `SharedFetch.end` ends what it waits for."""
        if job.sampler is not None:
            job.sampler.close()
            job.sampler = None
        self._late_fetch.end(job)
        if job.slot is not None:
            job.slot.dirty |= not job.slot.kept  # while it was busy, its end was not saved
            job.slot.busy = False
            job.slot.last_used = self._clock()
            job.slot = None
        self.worked = self._clock()
        if job in self.jobs:
            self.jobs.remove(job)
