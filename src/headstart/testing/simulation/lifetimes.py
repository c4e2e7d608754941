"""Lifetimes: when each block was computed last. Nothing of it may be used, or be kept, when its term is over.

What a server believes of the age of its entries plays no part: the engine notes when it computes a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import block_id
from headstart.serving.job import Job
from headstart.serving.slots import Slot
from headstart.testing.simulation.engine import SimulatedEngine
from headstart.testing.simulation.erasures import label_of
from headstart.testing.simulation.filesystem import ROOT, FileSystem
from headstart.testing.simulation.violation import require

if TYPE_CHECKING:
    from headstart.serving.runtime import Runtime

HEARD = 2.0
"""Virtual seconds after which a server knows a term that was set there, a jump of the clock, and what other programs did."""


class Lifetimes:
    """Times of blocks, for all servers of a history. Times are seconds since 1970, except those of `jumped`.

    Args:
        term: of all entries, in seconds.
        now: the virtual time.
        wall: the wall clock.

    Attributes:
        made: when the engine has computed tokens of a block, or of an open tail that was saved, last.
    """

    def __init__(self, term: float, block_size: int, now: Callable[[], float], wall: Callable[[], float]) -> None:
        self._term = term
        self._block_size = block_size
        self._now, self._wall = now, wall
        self.made: dict[BlockId, float] = {}
        self._text: dict[BlockId, float] = {}  # the same, but what is settled is as old as its turn
        self._jumped = -HEARD
        self._wrong = 0.0  # the latest time from which the clock was set back

    def jumped(self, seconds: float) -> None:
        """The clock was set forward, or back if `seconds` is negative."""
        self._jumped = self._now()
        if seconds < 0:
            self._wrong = max(self._wrong, self._wall() - seconds)

    def computed(self, engine: SimulatedEngine, slot: Slot, known: int = 0) -> None:
        """Notes when the blocks of a slot were computed, if that was in this slot.

        Args:
            known: leading tokens for which it has done so, with the same time of the slot's text.
        """
        first = 0 if self._wrong else known // self._block_size
        if ids := slot.ids[first:]:
            made = engine.made[slot.number, first * self._block_size : (first + len(ids)) * self._block_size]
            for key, at in zip(ids, made.reshape(-1, self._block_size).max(1).tolist(), strict=True):
                if at > self.made.get(key, -1.0):
                    self.made[key] = at
                # A text that came before the clock was set back is as old as that clock has said.
                text = slot.now if at < slot.now <= self._wrong else min(at, slot.now)
                if text > self._text.get(key, -1.0):
                    self._text[key] = text

    def saved(self, engine: SimulatedEngine, slot: Slot) -> None:
        """The content of a slot is exported: the same, and for its open tail."""
        self.computed(engine, slot)
        start = len(slot.ids) * self._block_size
        if start < len(slot):
            key = block_id(slot.parent_of(len(slot.ids)), slot.tokens[start:])
            self.made[key] = max(self.made.get(key, -1.0), engine.made[slot.number, start : len(slot)].max())

    def used(self, job: Job, own: tuple[float, float] | None, clock: float) -> None:
        """A job begins with what is stored.

        Args:
            own: the term of its owner, and when that was set.
            clock: the monotonic clock of its server.
        """
        assert job.plan is not None
        term = min(self._term, own[0] if own is not None and self._now() > own[1] + HEARD else self._term)
        if term == float("inf") or self._now() < self._jumped + HEARD + clock - job.started:
            return
        planned = self._wall() - (clock - job.started)
        for key in job.chain.ids[: job.plan.start // self._block_size]:
            require(planned - self._text.get(key, planned) <= term, "an entry is used after its term")

    def kept(self, keys: Iterable[BlockId], where: str) -> None:
        """What is still there has not outlived the term."""
        now = self._wall()
        old = any(now - self._text.get(key, now) > self._term for key in keys)
        require(self._now() < self._jumped + HEARD or not old, f"{where}: an entry is kept after its term")

    def shared(self, keys: Iterable[BlockId]) -> None:
        """No entry is too old in a shared store that deletes by itself. Its clock is right, whatever that of servers does."""
        if self._jumped < 0.0 and not self._wrong:
            self.kept(keys, "the shared store")

    def server(self, runtime: Runtime) -> None:
        """Nothing too old is in a server that has nothing to do."""
        memory = runtime.cache.memory
        self.kept((entry.id for entry in runtime.cache.index if memory.name in entry.copies), "memory")
        self.kept((key for slot in runtime.scheduler.slots if not slot.busy for key in slot.ids), "slots")

    def files(self, files: FileSystem) -> None:
        """No object on disk is too old, after a server has looked."""
        labels = (label_of(file) for file in files.disk.names.get(f"{ROOT}/objects", {}).values())
        self.kept((label.key for label in labels if label is not None), "disk")
