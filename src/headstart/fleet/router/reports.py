"""Reports: what a replica tells the routers, and in which order it counts.

A replica's *report* says what has changed in its tiers, and how long its queue is. Reports are numbered. The first report of a
process has sequence 0 and describes changes of an empty cache; a restarted replica begins a new, higher *epoch*.

Reports may be lost, doubled or reordered on the way. The `Sequencer` passes on the changes in order and without gaps. After a
gap the router asks the replica for a *dump*: a report with all that the replica holds, which replaces everything known of it.

The load is not a change but a state. So the load of the newest report counts, even if reports before it are missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from headstart.fleet.router.curve import Curve

BlockKey = int
"""A block or a checkpoint: 64 bits of its id (`chains`)."""

RUMOUR = 3600.0
"""Seconds after which a replica withdraws that a block is in the shared tier."""
_AHEAD = 64
"""Most reports that are kept while an earlier one is missing."""


class Tier(IntEnum):
    """Where a block is, the cheapest place first. `COMING`: a request of that replica is about to compute it."""

    LIVE = 0
    MEMORY = 1
    DISK = 2
    COMING = 3
    SHARED = 4
    """A rumour: the replica wrote the block to the shared tier, or read it there. It withdraws the rumour after an hour, or
    when the block is missing. Every replica can use the block."""


TierKeys = Mapping[Tier, Sequence[BlockKey]]


@dataclass(frozen=True, slots=True)
class Load:
    """What a request would wait for at a replica.

    Attributes:
        prefills: seconds of prefill that are left of each prompt in a slot.
        queued: seconds of prefill of the requests that wait for a slot.
        drag: seconds of decoding beside each second of prefill.
        hold: seconds until a slot is free.
        crowd: seconds for which one more request makes later ones wait for a slot.
        fetching: seconds of fetches from the shared tier that have been requested.
        call: seconds of a prefill call, which is not interrupted. A newcomer meets each of the prompts in the middle of one.
    """

    prefills: tuple[float, ...] = ()
    queued: float = 0.0
    drag: float = 0.0
    hold: float = 0.0
    crowd: float = 0.0
    fetching: float = 0.0
    call: float = 0.0


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a replica is, as it measured itself.

    Attributes:
        prefill: its prefill curve.
        memory: seconds per token to restore from memory.
        disk: the same from disk.
        fetch: seconds per token from the shared tier; None if the replica has none.
        round_trip: seconds until the first byte of a fetch.
    """

    prefill: Curve = field(default_factory=Curve)
    memory: float = 1e-6
    disk: float = 1e-5
    fetch: float | None = None
    round_trip: float = 0.001


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A message of a replica.

    Attributes:
        epoch: number of the replica's process; a later process has a higher one.
        sequence: number of the report in its epoch, from 0.
        added: by tier, what came; for a dump, all that is there.
        removed: by tier, what left. It is applied before `added`.
        dump: whether it says all that the replica holds.
        arrived: ids of requests that are part of `load` or were served. A replica repeats them for some seconds, so that a
            lost report does no harm.
        done: ids of requests whose prefill has ended, also repeated.
        speed: as the replica measured it. Each report has it, because a router that begins to listen must not take a slow
            replica for a fast one until its dump has come.
    """

    replica: str
    epoch: int
    sequence: int
    load: Load = Load()
    added: TierKeys = field(default_factory=dict)
    removed: TierKeys = field(default_factory=dict)
    dump: bool = False
    arrived: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    speed: Speed = Speed()


@dataclass(frozen=True, slots=True)
class OrderedReports:
    """What follows from a report.

    Attributes:
        changes: reports whose changes are to be applied now, in this order.
        restarted: whether the replica is a new process, so that all that was known of the old one is void.
        newest: whether the report's load is the newest one.
    """

    changes: tuple[ReplicaReport, ...] = ()
    restarted: bool = False
    newest: bool = False


class Sequencer:
    """Puts the reports of one replica in order."""

    def __init__(self) -> None:
        self._epoch = -1
        self._last = -1
        self._newest = -1
        self._ahead: dict[int, ReplicaReport] = {}

    @property
    def gap(self) -> bool:
        """Whether reports are missing, so that a dump is needed."""
        return bool(self._ahead)

    def take(self, report: ReplicaReport) -> OrderedReports:
        if report.epoch < self._epoch:
            return OrderedReports()
        restarted = report.epoch > self._epoch
        if restarted:
            self._epoch, self._last, self._newest = report.epoch, -1, -1
            self._ahead.clear()
        newest = report.sequence > self._newest
        self._newest = max(self._newest, report.sequence)
        if report.sequence <= self._last:
            return OrderedReports((), restarted, newest)
        if report.sequence > self._last + 1 and not report.dump:
            if len(self._ahead) >= _AHEAD:
                del self._ahead[min(self._ahead)]
            self._ahead[report.sequence] = report
            return OrderedReports((), restarted, newest)
        changes = [report]
        while (following := self._ahead.pop(changes[-1].sequence + 1, None)) is not None:
            changes.append(following)
        self._last = changes[-1].sequence
        self._ahead = {sequence: one for sequence, one in self._ahead.items() if sequence > self._last}
        return OrderedReports(tuple(changes), restarted, newest)
