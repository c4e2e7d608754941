"""Listener: hears what a runtime holds and does. A runtime has any number of them, in `Listeners`.

A replica of a fleet listens, to tell the router; the API listens while somebody watches. All calls but those of
`SharedListener` come on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, Protocol

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import Chain
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import IndexListener, NoIndexListener
from headstart.prefix_cache.planner import Mode
from headstart.serving.job import Job
from headstart.serving.request import Report, StopReason
from headstart.serving.slots import Slot
from headstart.tiers.disk import Label
from headstart.tiers.shared_tier import NoSharedListener, SharedListener

JobEnd = StopReason | Literal["cancelled", "failed"]
"""How a job ended."""


class Listener(IndexListener, SharedListener, Protocol):
    """All methods must return at once."""

    def begin(self, mode: Mode) -> None:
        """The runtime is being set up. Called once, before all else."""

    def arrived(self, job: Job, available: Callable[[Chain], int]) -> None:
        """A job has joined the queue.

        Args:
            available: the tokens of a prompt that need no computation now. It takes up to a millisecond.
        """

    def began(self, job: Job) -> None:
        """A job has got a slot, with its plan loaded."""

    def replying(self, job: Job, report: Report) -> None:
        """The prefill of a job is over."""

    def ended(self, job: Job, how: JobEnd, report: Report | None = None) -> None:
        """A job has left the queue or its slot for good. One that replied to the end has a report, and one
        that was cancelled in its slot."""

    def pinned(self, keys: Collection[BlockId]) -> None:
        """Entries were pinned, or are not pinned any more."""

    def prefilled(self, start: int, stop: int, seconds: float) -> None:
        """A prefill call has computed these positions, at least a block of them. A tail that fills a block counts as one."""

    def decoded(self, replies: int, seconds: float) -> None:
        """Each of so many replies has got one more token."""

    def restored(self, tiers: Mapping[str, int], seconds: float) -> None:
        """Stored entries were loaded into a slot: tokens of each tier."""

    def stepped(self, slots: Sequence[Slot], running: Sequence[Job], waiting: Iterable[Job]) -> None:
        """The scheduler has done a step, or some idle work. Nothing of these changes before the method returns."""


class NoListener(NoIndexListener, NoSharedListener):
    """Nobody listens."""

    def begin(self, mode: Mode) -> None:
        pass

    def arrived(self, job: Job, available: Callable[[Chain], int]) -> None:
        pass

    def began(self, job: Job) -> None:
        pass

    def replying(self, job: Job, report: Report) -> None:
        pass

    def ended(self, job: Job, how: JobEnd, report: Report | None = None) -> None:
        pass

    def pinned(self, keys: Collection[BlockId]) -> None:
        pass

    def prefilled(self, start: int, stop: int, seconds: float) -> None:
        pass

    def decoded(self, replies: int, seconds: float) -> None:
        pass

    def restored(self, tiers: Mapping[str, int], seconds: float) -> None:
        pass

    def stepped(self, slots: Sequence[Slot], running: Sequence[Job], waiting: Iterable[Job]) -> None:
        pass


class Listeners:
    """A `Listener` that passes everything on to others. `add` and `remove` are for the engine thread, or before it runs."""

    def __init__(self, *listeners: Listener) -> None:
        self._all = listeners

    def __contains__(self, listener: object) -> bool:
        return any(one is listener for one in self._all)

    def add(self, listener: Listener) -> None:
        self._all = (*self._all, listener)

    def remove(self, listener: Listener) -> None:
        self._all = tuple(one for one in self._all if one is not listener)

    def begin(self, mode: Mode) -> None:
        for one in self._all:
            one.begin(mode)

    def added(self, entry: Entry, tier: str) -> None:
        for one in self._all:
            one.added(entry, tier)

    def removed(self, entry: Entry, tier: str) -> None:
        for one in self._all:
            one.removed(entry, tier)

    def arrived(self, job: Job, available: Callable[[Chain], int]) -> None:
        for one in self._all:
            one.arrived(job, available)

    def began(self, job: Job) -> None:
        for one in self._all:
            one.began(job)

    def replying(self, job: Job, report: Report) -> None:
        for one in self._all:
            one.replying(job, report)

    def ended(self, job: Job, how: JobEnd, report: Report | None = None) -> None:
        for one in self._all:
            one.ended(job, how, report)

    def pinned(self, keys: Collection[BlockId]) -> None:
        for one in self._all:
            one.pinned(keys)

    def prefilled(self, start: int, stop: int, seconds: float) -> None:
        for one in self._all:
            one.prefilled(start, stop, seconds)

    def decoded(self, replies: int, seconds: float) -> None:
        for one in self._all:
            one.decoded(replies, seconds)

    def restored(self, tiers: Mapping[str, int], seconds: float) -> None:
        for one in self._all:
            one.restored(tiers, seconds)

    def stepped(self, slots: Sequence[Slot], running: Sequence[Job], waiting: Iterable[Job]) -> None:
        for one in self._all:
            one.stepped(slots, running, waiting)

    def in_store(self, label: Label) -> None:
        for one in self._all:
            one.in_store(label)

    def not_in_store(self, key: BlockId) -> None:
        for one in self._all:
            one.not_in_store(key)
