"""Journal: the listener of a replica's runtime. It keeps what a report says, until one is made.

The engine thread writes, threads of the shared tier write rumours, and one thread reads. What a report says of the cache and of
the queue is as it was after one step of the scheduler, except for copies that came or went in the step that is running.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headstart.fleet.replica.bookings import Bookings
from headstart.fleet.replica.held import HeldKeys, by_tier
from headstart.fleet.replica.live import LiveBlocks
from headstart.fleet.replica.load import QueueState, QueueWatch
from headstart.fleet.replica.rumours import Rumours
from headstart.fleet.replica.speed import Speedometer
from headstart.fleet.router.chains import block_key, checkpoint_key
from headstart.fleet.router.reports import BlockKey, Tier, TierKeys
from headstart.interfaces.tier import STATE
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import Chain
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.planner import Mode
from headstart.serving.job import Job, Ticket
from headstart.serving.listener import NoListener
from headstart.serving.slots import Slot
from headstart.tiers.disk import Label

TIERS: Final[dict[str, Tier]] = {"memory": Tier.MEMORY, "disk": Tier.DISK}
"""The tiers of the index, by their names."""


@dataclass(frozen=True, slots=True)
class Drained:
    """What happened since the journal was last drained, and the queue now.

    Attributes:
        arrived: bookings of requests that joined the queue, and are part of `queue` if they are not over.
        done: bookings of requests whose prefill is over, or that are over themselves.
    """

    removed: TierKeys
    added: TierKeys
    arrived: tuple[str, ...]
    done: tuple[str, ...]
    queue: QueueState

    @property
    def empty(self) -> bool:
        """Whether nothing happened."""
        return not (self.removed or self.added or self.arrived or self.done)


class Journal(NoListener):
    """A `Listener`. Give it to one runtime: ``Runtime(engine, settings, listener=journal)``.

    Full blocks and the checkpoints at their ends are kept, under the keys of `router/chains`. Open tails are not: no prompt of
    another conversation can find them by a key. In exact mode only canonical copies are kept.

    Args:
        clock: a monotonic clock in seconds.

    Attributes:
        bookings: of the requests that come. One without a booking is named by its own id.
        speedometer: what was measured.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.bookings = Bookings()
        self.speedometer = Speedometer()
        self._clock = clock
        self._lock = threading.Lock()
        self._held = HeldKeys()
        self._rumours = Rumours(self._held)
        self._queue = QueueWatch()
        self._open: dict[Ticket, str] = {}  # the bookings of requests whose prefill is not over
        self._arriving: list[str] = []  # bookings of this step
        self._arrived: list[str] = []
        self._done: list[str] = []

    # ── the engine thread ────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, mode: Mode) -> None:
        self._mode = mode
        self._live = LiveBlocks(self._held, mode)

    def added(self, entry: Entry, tier: str) -> None:
        if entry.length == self._mode.traits.block_size and (entry.copies[tier] or not self._mode.exact):
            with self._lock:
                self._held.add(key_of(entry), TIERS[tier])

    def removed(self, entry: Entry, tier: str) -> None:
        if entry.length == self._mode.traits.block_size:
            with self._lock:
                self._held.remove(key_of(entry), TIERS[tier])

    def arrived(self, job: Job, available: Callable[[Chain], int]) -> None:
        self._queue.arrived(job, available)
        if job.choice == 0:
            booking = self._open[job.ticket] = self.bookings.take(job.request.id) or job.request.id
            if booking:
                self._arriving.append(booking)

    def prefilled(self, start: int, stop: int, seconds: float) -> None:
        self.speedometer.prefilled(start, stop, seconds)

    def decoded(self, replies: int, seconds: float) -> None:
        self.speedometer.decoded(seconds)

    def restored(self, tiers: Mapping[str, int], seconds: float) -> None:
        self.speedometer.restored(tiers, seconds)

    def stepped(self, slots: Sequence[Slot], running: Sequence[Job], waiting: Iterable[Job]) -> None:
        with self._lock:
            self._live.look(slots)
            self._queue.stepped(running, waiting)
            self._arrived += self._arriving  # not before: from then on a router takes the load's word for them
            self._arriving.clear()
            over = [ticket for ticket in self._open if ticket.reports or ticket.cancelled or ticket.over]
            # Of a cancelled request there is no event.
            self._done += [booking for ticket in over if (booking := self._open.pop(ticket))]

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def in_store(self, label: Label) -> None:
        with self._lock:
            self._rumours.add(label.key, key_of(label), self._clock())

    def not_in_store(self, key: BlockId) -> None:
        with self._lock:
            self._rumours.withdraw(key)

    # ── the thread that reads ────────────────────────────────────────────────────────────────────────────────────────

    def drain(self) -> Drained:
        """What happened since the last call. It costs as much as has changed, however much is held."""
        with self._lock:
            self._rumours.expire(self._clock())
            removed, added = self._held.drain()
            arrived, self._arrived = tuple(self._arrived), []
            done, self._done = tuple(self._done), []
            return Drained(removed, added, arrived, done, self._queue.state)

    def drained(self) -> TierKeys:
        """All that was held when the journal was last drained."""
        with self._lock:
            held = self._held.drained()
        return by_tier(held)

    @property
    def queue(self) -> QueueState:
        """The queue after the last step."""
        return self._queue.state


def key_of(entry: Entry | Label) -> BlockKey:
    """The router's key of a block, or of the checkpoint at the end of one."""
    state = entry.kind == STATE if isinstance(entry, Label) else entry.state
    if state:
        return checkpoint_key(block_key(entry.parent))
    return block_key(entry.key if isinstance(entry, Label) else entry.id)
