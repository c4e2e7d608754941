"""Reporter: makes the reports of a replica.

    journal = Journal()
    runtime = Runtime(engine, settings, listener=journal)
    reporter = Reporter(runtime, journal, "replica-1", epoch=7)
    while True:                                    # about ten times a second
        if (report := reporter.report()) is not None:
            ...                                    # send it to all routers
    reporter.dump()                                # when a router asks for it, for this router
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import takewhile

from headstart.fleet.replica.journal import Journal
from headstart.fleet.replica.load import QueueState, load_of
from headstart.fleet.router.reports import Load, ReplicaReport, Speed
from headstart.fleet.router.slots import SlotTimes
from headstart.serving.running_jobs import Outcome
from headstart.serving.runtime import Runtime

HEARTBEAT = 1.0
"""Most seconds between two reports."""
REPEATED = 5.0
"""Seconds for which a request's arrival, and the end of its prefill, are repeated."""


class Reporter:
    """Reports of one process. `report` and `dump` are for one thread; another one may call `waiting`.

    Args:
        journal: a listener of the runtime.
        name: the replica's name.
        epoch: number of this process. A later process of the same replica needs a higher one.
        clock: a monotonic clock in seconds.

    Raises:
        ValueError: it is not.

    Attributes:
        speed: as of the last report.
    """

    def __init__(
        self, runtime: Runtime, journal: Journal, name: str, *, epoch: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if journal not in runtime.listeners:
            raise ValueError("the journal must be a listener of the runtime")
        self._runtime = runtime
        self._journal = journal
        self._name = name
        self._epoch = epoch
        self._clock = clock
        self._times = SlotTimes(runtime.engine.shape.slots)
        self._sequence = -1  # of the last report
        self._sent = -HEARTBEAT
        self._load = Load()
        self.speed = Speed()
        self._arrived, self._done = RepeatedIds(REPEATED), RepeatedIds(REPEATED)
        runtime.observe(self._ended)

    def report(self) -> ReplicaReport | None:
        """What has changed since the last report. None if nothing has, and the last report is less than a second old.

        Every report counts: one that gets lost is a gap, and the router asks for a dump.
        """
        now, drained, speed = self._clock(), self._journal.drain(), self._measured()
        load = self._load_of(drained.queue, speed)
        if drained.empty and load == self._load and now < self._sent + HEARTBEAT:
            return None
        self._arrived.add(drained.arrived, now)
        self._done.add(drained.done, now)
        self._sequence += 1
        self._sent, self._load = now, load
        return ReplicaReport(
            self._name,
            self._epoch,
            self._sequence,
            load,
            drained.added,
            drained.removed,
            arrived=self._arrived.at(now),
            done=self._done.at(now),
            speed=speed,
        )

    def dump(self) -> ReplicaReport:
        """All that is held, as the last report left it, under its number. So it may go to the router alone that asks for it."""
        if self._sequence < 0:
            first = self.report()
            assert first is not None
            return replace(first, dump=True)
        now, speed = self._clock(), self._measured()
        return ReplicaReport(
            self._name,
            self._epoch,
            self._sequence,
            self._load_of(self._journal.queue, speed),
            self._journal.drained(),
            dump=True,
            arrived=self._arrived.at(now),
            done=self._done.at(now),
            speed=speed,
        )

    def waiting(self) -> float:
        """Seconds of prefill that the replica has to do, decoding beside it not counted."""
        return self._journal.queue.seconds(self.speed.prefill)

    def _measured(self) -> Speed:
        shape = self._runtime.engine.shape
        self.speed = self._journal.speedometer.speed(shape.kv_bytes_per_token, self._runtime.cache.shared.fetching)
        return self.speed

    def _load_of(self, queue: QueueState, speed: Speed) -> Load:
        shape, block = self._runtime.engine.shape, self._runtime.engine.traits.block_size
        token = speed.prefill.per_token
        stall, patience = (  # a call is mostly met by a prompt that nobody else waited behind
            min(max(seconds, block * token), shape.batch * token)
            for seconds in (self._runtime.settings.stall, 2 * self._runtime.scheduler.prefill.patience)
        )
        return load_of(queue, speed, self._times, shape.slots, self._journal.speedometer.step, stall, patience)

    def _ended(self, outcome: Outcome) -> None:
        self._times.ended(outcome.report.prefill + outcome.report.decode)


class RepeatedIds:
    """Ids that are repeated for some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: deque[tuple[float, str]] = deque()

    def add(self, ids: Iterable[str], now: float) -> None:
        self._since.extend((now, one) for one in ids)

    def at(self, now: float) -> tuple[str, ...]:
        """The ids that are to be repeated, the oldest first."""
        for _ in range(sum(1 for _ in takewhile(lambda one: one[0] <= now - self._seconds, self._since))):
            self._since.popleft()
        return tuple(dict.fromkeys(one for _, one in self._since))
