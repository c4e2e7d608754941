"""Load: the queue of a replica, in seconds.

The engine thread publishes a `QueueState`, in tokens. The thread that reports turns it into seconds, with the speed that it
knows by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headstart.fleet.router.curve import Curve
from headstart.fleet.router.reports import Load, Speed
from headstart.fleet.router.slots import SlotTimes
from headstart.prefix_cache.blocks import Chain, last_block_boundary
from headstart.serving.job import Job

PromptRest = tuple[int, int]
"""What is to be computed of a prompt: from a position to its end."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """What a replica has to do.

    Attributes:
        prefills: what is left of each prompt in a slot.
        queued: what must be computed of each prompt that waits for a slot.
        replies: number of replies that are running.
        fetching: tokens that were asked of the shared tier and may still come.
    """

    prefills: tuple[PromptRest, ...] = ()
    queued: tuple[PromptRest, ...] = ()
    replies: int = 0
    fetching: int = 0

    def seconds(self, curve: Curve) -> float:
        """All prefill together."""
        return sum(curve.seconds(*rest) for rest in (*self.prefills, *self.queued))


class QueueWatch:
    """Makes the `QueueState`. For the engine thread, but for `state`, which any thread may read."""

    def __init__(self) -> None:
        self.state = QueueState()
        self._starts: dict[Job, int] = {}  # tokens that each waiting job need not compute
        self._parked: set[Job] = set()
        self._available: Callable[[Chain], int] = lambda _: 0

    def arrived(self, job: Job, available: Callable[[Chain], int]) -> None:
        """A job waits. What it need not compute is looked up now, and again when its fetch is over."""
        self._available = available
        self._look(job)

    def _look(self, job: Job) -> None:
        if job.parked:
            self._parked.add(job)
        self._starts[job] = self._start(job)

    def _start(self, job: Job) -> int:
        if not job.request.params.reuse:
            return 0
        if job.choice:  # the first choice computes all before
            return last_block_boundary(len(job.chain), job.chain.block_size)
        return self._available(job.chain)

    def stepped(self, running: Sequence[Job], waiting: Iterable[Job]) -> None:
        """Publishes the state after a step."""
        waits = list(waiting)
        for job in waits:
            if job not in self._starts:  # it has given its slot back
                self._look(job)
        for job in [job for job in self._parked if not job.parked]:
            self._parked.remove(job)
            self._starts[job] = self._start(job)
        self._starts = {job: self._starts[job] for job in waits}
        self.state = QueueState(
            tuple((len(job.slot), len(job.chain)) for job in running if job.slot is not None and job.prefilling),
            tuple((start, len(job.chain)) for job, start in self._starts.items()),
            sum(1 for job in running if not job.prefilling),
            sum(self._lacking(job) for job in self._parked),
        )

    def _lacking(self, job: Job) -> int:
        """Tokens that a parked job may still get."""
        if job.fetch is None:  # another job fetches for it
            return 0
        block_size = job.chain.block_size
        brought = sum(not entry.state for entry in job.held.brought.values()) * block_size
        return max(0, last_block_boundary(len(job.chain), block_size) - self._starts.get(job, 0) - brought)


def load_of(state: QueueState, speed: Speed, times: SlotTimes, slots: int, step: float, stall: float, patience: float) -> Load:
    """The load of a replica with so many slots.

    Args:
        step: seconds of a step of decoding, with as many replies as there are.
        stall, patience: seconds of a prefill call beside running replies, and without any.
    """
    busy = len(state.prefills) + state.replies
    return Load(
        prefills=tuple(speed.prefill.seconds(*rest) for rest in state.prefills),
        queued=sum(speed.prefill.seconds(*rest) for rest in state.queued),
        drag=step / stall if state.replies and stall else 0.0,
        hold=times.hold(len(state.queued), slots - busy),
        crowd=times.crowd(busy + len(state.queued)),
        fetching=state.fetching * (speed.fetch or 0.0),
        call=(stall if state.replies else patience) if state.prefills else 0.0,
    )
