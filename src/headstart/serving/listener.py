"""Listener: hears what a runtime holds and does. Without one, `NoListener` takes its place.

A replica of a fleet listens, to tell the router. All calls but those of `SharedListener` come on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from headstart.prefix_cache.blocks import Chain
from headstart.prefix_cache.index import IndexListener, NoIndexListener
from headstart.prefix_cache.planner import Mode
from headstart.serving.job import Job
from headstart.serving.slots import Slot
from headstart.tiers.shared_tier import NoSharedListener, SharedListener


class Listener(IndexListener, SharedListener, Protocol):
    """All methods must return at once."""

    def begin(self, mode: Mode) -> None:
        """The runtime is being set up. Called once, before all else."""

    def arrived(self, job: Job, available: Callable[[Chain], int]) -> None:
        """A job has joined the queue.

        Args:
            available: the tokens of a prompt that need no computation now. It takes up to a millisecond.
        """

    def prefilled(self, start: int, stop: int, seconds: float) -> None:
        """A prefill call has computed these positions, at least a block of them."""

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

    def prefilled(self, start: int, stop: int, seconds: float) -> None:
        pass

    def decoded(self, replies: int, seconds: float) -> None:
        pass

    def restored(self, tiers: Mapping[str, int], seconds: float) -> None:
        pass

    def stepped(self, slots: Sequence[Slot], running: Sequence[Job], waiting: Iterable[Job]) -> None:
        pass
