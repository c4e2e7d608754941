"""Late fetch: a long prompt that is being computed asks the shared tier again for what it still lacks.

A store pauses for a moment, is left alone for a second, or is still being written to by another server. That ends a fetch, and
to compute the rest could take a minute. So the tier is asked again while the prompt is computed: at once, and then after 1, 2,
4 … s. When much of it comes, the job gives its slot back and waits for the rest like a new one (`shared_fetch`); what it has
computed is not lost. Used from the engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headstart.serving.admission import Admission
from headstart.serving.job import Job
from headstart.serving.shared_fetch import SharedFetch

LEAST = 0.5
"""Seconds that must be gained, for a job to ask and to give its slot back."""
BARRED = 0.5
"""Seconds between two looks, while the store is left alone, is known to lack the next block, or brings it to another job."""


class LateFetch:
    """Asks for jobs that have a slot."""

    def __init__(self, shared_fetch: SharedFetch, admission: Admission, clock: Callable[[], float]) -> None:
        self._shared_fetch = shared_fetch
        self._admission = admission
        self._clock = clock

    def step(self, running: Sequence[Job]) -> Job | None:
        """A job that should give its slot back: its prompt has come to memory, or comes (`Job.late`). None if there is none."""
        for job in running:
            if not job.prefilling:
                self.end(job)
            elif self._shared_fetch.serves(job) and self._comes(job):
                return job
        return None

    def end(self, job: Job) -> None:
        """A job needs nothing any more."""
        if job.late is not None:
            job.late.stop()
            job.late = None

    def _comes(self, job: Job) -> bool:
        """Whether much of its prompt comes for a job, or has come for another one. Begins to ask if it is time to."""
        if job.late is None:
            now, (due, pause) = self._clock(), job.asks
            if now < due or self._gain(job, len(job.chain)) < LEAST:
                return False
            if self._gain(job, self._admission.loadable(job.chain)) >= LEAST:
                job.asks = now + pause, 2 * pause
                return True
            wanted = None if self._shared_fetch.bringing(job) else self._shared_fetch.wanted(job.chain)
            job.late = None if wanted is None else self._shared_fetch.fetch(wanted)
            job.deletion_count = self._shared_fetch.deletion_count()
            job.asks = (now + BARRED, pause) if job.late is None else (now + pause, 2 * pause)
        elif job.late.arrived and self._gain(job, job.late.there) >= LEAST:
            return True
        elif job.late.arrived or job.late.over:
            self.end(job)
        return False

    def _gain(self, job: Job, there: int) -> float:
        """Seconds that are gained if the first `there` tokens are restored, and not computed from here on."""
        assert job.slot is not None
        pace = self._admission.pace
        return (there - len(job.slot)) * pace.prefill - there * pace.restore
