"""Costs: the expected seconds to the first token of a prompt, at each replica at once.

    first token  =  max(wait, slot, fetch)  +  compute + restore,   wait, compute and restore slowed down by decoding
    cost         =  first token  +  (weight − 1) × (compute + fetch)  +  others × delay of the prompts there  +  crowd

The *wait* is estimated as if the prompts in the slots took turns: for a longer prompt the request waits as many seconds as it
has itself, and at least for half of the call that runs. A replica computes the prompt with the least left, so the real wait is
shorter: long prompts add the call that runs only. The estimate keeps requests away from replicas whose long prompts they would
delay, and it was no worse than the exact one in simulations. The time until a *slot* is free overlaps with the wait, because
replies hold slots while other prompts are computed.

The weight is more than 1, because what a replica computes now is what later requests wait for. For the same reason the *crowd*
counts: with nearly all slots busy, one more reply makes later requests wait for a slot.

The fetch is used only where it makes the cost less. Then the replica computes what is beyond its own blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headstart.fleet.router.holdings import Column, Reach
from headstart.fleet.router.reports import Load, Speed, Tier

Seconds = npt.NDArray[np.float64]
"""One number for each column."""

_PROMPTS = 128
"""Most prompts in slots that are known one by one; further ones count as waiting for a slot."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What a second counts beside a second of the request's own first token.

    Attributes:
        work: a second that the replica computes or fetches, for the requests that will come.
        others: a second by which a prompt that is already there is delayed.
    """

    work: float = 4.0
    others: float = 0.5


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a prompt would cost at each column.

    Attributes:
        cost: what the router minimises; infinite for a column that is no replica.
        first_token: expected seconds to the first token.
        work: seconds of prefill and restoring that it adds to the queue.
        queue: seconds of prefill that are there already.
        start: tokens that need not be computed.
    """

    cost: Seconds
    first_token: Seconds
    work: Seconds
    queue: Seconds
    start: Seconds


class Board:
    """The speed and the queue of each replica, as columns of arrays."""

    def __init__(self, weights: Weights | None = None) -> None:
        self._weights = weights or Weights()
        self._size = 0
        self._allocate(8, 8)

    def _allocate(self, room: int, prompts: int) -> None:
        """Makes room for more columns, and for more prompts of each."""

        def grown(name: str, shape: tuple[int, ...], fill: float = 0.0) -> Seconds:
            new = np.full(shape, fill)
            old = getattr(self, name, None)
            if old is not None:
                new[tuple(map(slice, old.shape))] = old
            return new

        self._absent = grown("_absent", (room,), np.inf)
        self._prefills = grown("_prefills", (prompts, room))
        self._queued = grown("_queued", (room,))
        self._total = grown("_total", (room,))
        self._since = grown("_since", (room,))
        self._drag = grown("_drag", (room,), 1.0)
        self._hold = grown("_hold", (room,))
        self._crowd = grown("_crowd", (room,))
        self._fetching = grown("_fetching", (room,))
        self._call = grown("_call", (room,))
        self._per_token = grown("_per_token", (room,))
        self._per_depth = grown("_per_depth", (room,))
        self._restore = grown("_restore", (len(Tier), room))
        self._fetch = grown("_fetch", (room,), np.inf)
        self._round_trip = grown("_round_trip", (room,))

    def grow(self) -> None:
        """Adds a column, of no replica yet."""
        if self._size == len(self._absent):
            self._allocate(2 * self._size, len(self._prefills))
        self._size += 1

    def present(self, column: Column, speed: Speed) -> None:
        """The column is a replica with this speed."""
        self._absent[column] = 0.0
        self._per_token[column], self._per_depth[column] = speed.prefill.per_token, speed.prefill.per_depth
        self._restore[Tier.MEMORY, column], self._restore[Tier.DISK, column] = speed.memory, speed.disk
        self._fetch[column] = np.inf if speed.fetch is None else speed.fetch
        self._round_trip[column] = speed.round_trip

    def absent(self, column: Column) -> None:
        """The column is no replica any longer."""
        self._absent[column] = np.inf

    def load(self, column: Column, load: Load, booked: Sequence[float], now: float) -> None:
        """The queue of a column. `booked`: seconds of the requests that are on their way to it."""
        prompts = [*load.prefills, *booked]
        while len(self._prefills) < min(len(prompts), _PROMPTS):
            self._allocate(len(self._absent), 2 * len(self._prefills))
        known = prompts[: len(self._prefills)]
        self._prefills[:, column] = 0.0
        self._prefills[: len(known), column] = known
        self._queued[column] = load.queued + sum(prompts[len(known) :])
        self._total[column] = load.queued + sum(prompts)
        self._since[column] = now
        self._drag[column] = 1.0 + load.drag
        self._hold[column] = load.hold
        self._crowd[column] = load.crowd
        self._fetching[column] = load.fetching
        self._call[column] = load.call

    def add(self, column: Column, seconds: float, now: float) -> None:
        """A request with so many seconds of prefill is on its way to a column."""
        self._total[column] = self._left(column, now) + seconds
        self._since[column] = now
        free = int(self._prefills[:, column].argmin())
        if self._prefills[free, column] == 0.0:
            self._prefills[free, column] = seconds
        elif len(self._prefills) < _PROMPTS:
            free = len(self._prefills)
            self._allocate(len(self._absent), 2 * free)
            self._prefills[free, column] = seconds
        else:
            self._queued[column] += seconds

    def waiting(self, column: Column, now: float) -> float:
        """Seconds of prefill that a column has in its queue."""
        return float(self._left(column, now))

    def _left(self, column: Column, now: float) -> float:
        passed = (now - self._since[column]) / self._drag[column]
        return max(0.0, float(self._total[column] - passed))

    def estimate(self, reach: Reach, tokens: int, block_size: int, now: float) -> Estimate:
        """What a prompt of `tokens` would cost at each column."""
        size = self._size
        per_token, per_depth = self._per_token[:size], self._per_depth[:size] / 2
        own, whole = reach.own * block_size, reach.all * block_size
        square = float(tokens) * tokens
        computed_alone = per_token * (tokens - own) + per_depth * (square - own * own)
        computed = per_token * (tokens - whole) + per_depth * (square - whole * whole)
        shared = reach.tiers[Tier.SHARED] * block_size
        fetch, compute, start = np.zeros(size), computed, whole
        beyond = shared > 0
        if beyond.any():
            np.multiply(shared, self._fetch[:size], out=fetch, where=beyond)
            fetch += beyond * (self._round_trip[:size] + self._fetching[:size])
            better = computed + fetch < computed_alone
            fetch, compute = np.where(better, fetch, 0.0), np.where(better, computed, computed_alone)
            start = np.where(better, whole, own)
        work = compute + block_size * (reach.tiers * self._restore[:, :size]).sum(axis=0)
        left = np.maximum(0.0, self._total[:size] - (now - self._since[:size]) / self._drag[:size])
        prefills = self._prefills[:, :size]
        turns = np.minimum(prefills, np.maximum(work, self._call[:size] / 2)).sum(axis=0)
        wait = np.minimum(turns + self._queued[:size], left)
        coming = reach.tiers[Tier.COMING]
        if coming.any():
            before = whole - coming * block_size
            wait = np.maximum(wait, np.minimum(left, per_token * (whole - before) + per_depth * (whole**2 - before**2)))
        drag = self._drag[:size]
        first_token = np.maximum.reduce((wait * drag, self._hold[:size], fetch)) + work * drag
        delay = np.minimum(np.minimum(prefills, work).sum(axis=0), left)
        cost = first_token + (self._weights.work - 1.0) * (work + fetch) + self._weights.others * delay + self._crowd[:size]
        return Estimate(cost + self._absent[:size], first_token, work, left, start.astype(np.float64))
