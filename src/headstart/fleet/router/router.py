"""The router: sends each prompt to the replica with the least expected cost.

    router = FleetRouter()
    if router.report(report, now):              # a replica's message; True: ask the replica for a dump
        ...
    choice = router.choose("request-1", chain_of(root, 64, tokens), now)

A router that knows nothing of the blocks sends requests where the wait is least. After one dump of each replica it knows all.
Its whole state is soft: it may be lost at any time.

`choose` books what it chooses in the same step (`book`). So requests that arrive at once do not all go to the replica that was
idle in the last report.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from headstart.fleet.router.book import Book, Booking
from headstart.fleet.router.chains import PromptChain
from headstart.fleet.router.costs import Board, Weights
from headstart.fleet.router.holdings import Column, Holdings
from headstart.fleet.router.reports import BlockKey, Load, ReplicaReport, Sequencer, Tier

ASK_AGAIN = 1.0
"""Seconds between two requests for a dump."""
TIE = 1e-3
"""Costs that differ by less, as a share of the first token or in seconds, are equal."""


@dataclass(frozen=True, slots=True)
class ChosenReplica:
    """Where a request goes.

    Attributes:
        first_token: expected seconds to the first token.
        reused: tokens of the prompt that the replica need not compute.
        computed: tokens that it computes.
    """

    replica: str
    first_token: float
    reused: int
    computed: int


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What the router knows of a replica.

    Attributes:
        blocks: number of blocks and checkpoints that it holds, rumours of the shared tier included.
        wait: seconds of prefill in its queue.
        age: seconds since its last report.
        gap: whether reports are missing, so that `blocks` may be out of date.
    """

    replica: str
    blocks: int
    wait: float
    age: float
    gap: bool


@dataclass(slots=True)
class _Replica:
    name: str
    column: Column
    order: Sequencer = field(default_factory=Sequencer)
    load: Load = field(default_factory=Load)
    heard: float = 0.0
    asked: float = float("-inf")


class FleetRouter:
    """Chooses replicas. Times are seconds of any clock that the caller always uses. Not thread-safe."""

    def __init__(self, weights: Weights | None = None) -> None:
        self._holdings = Holdings()
        self._board = Board(weights)
        self._book = Book()
        self._replicas: dict[str, _Replica] = {}
        self._columns: list[_Replica | None] = []
        self._given = np.zeros(0)  # seconds of work that each column was sent, to break ties

    def report(self, report: ReplicaReport, now: float) -> bool:
        """Takes a replica's message. True if the caller must ask the replica for a dump."""
        replica = self._replicas.get(report.replica) or self._enter(report.replica)
        taken = replica.order.take(report)
        if taken.restarted:
            self._forget(replica)
        for change in taken.changes:
            if change.dump:
                self._holdings.replace(replica.column, change.added)
            else:
                self._holdings.change(replica.column, change.removed, change.added)
        for request in report.arrived:
            self._book.arrived(request, now)
        for request in report.done:
            self._come(self._book.close(request))
        if taken.newest:
            replica.load, replica.heard = report.load, now
            self._board.present(replica.column, report.speed)
            self._reload(replica)
        if not replica.order.gap or now - replica.asked < ASK_AGAIN:
            return False
        replica.asked = now
        return True

    def choose(self, request: str, chain: PromptChain, now: float, *, without: Collection[str] = ()) -> ChosenReplica | None:
        """Chooses a replica for a request and books it there. None if there is no replica.

        Args:
            request: an id, under which the replica's reports will name it. A booking under the same id ends.
            without: replicas that must not be chosen, for example because they refused the request.
        """
        self.close(request)
        for booking in self._book.overdue(now):
            self._unbook(booking)
        if not self._replicas:
            return None
        reach = self._holdings.reach(chain)
        estimate = self._board.estimate(reach, chain.tokens, chain.block_size, now)
        cost = estimate.cost
        for name in without:
            if name in self._replicas:
                cost[self._replicas[name].column] = np.inf
        best = cost.min()
        if best == np.inf:
            return None
        equal = np.flatnonzero(cost <= best + TIE * max(1.0, best))
        column = int(equal[np.lexsort((self._given[equal], estimate.queue[equal]))[0]])
        replica, start = self._at(column), int(estimate.start[column])
        seconds = float(estimate.work[column])
        self._given[column] += seconds
        coming = chain.keys[int(reach.own[column]) :]
        self._holdings.change(column, {}, {Tier.COMING: coming})
        self._book.add(Booking(request, column, seconds, coming), now)
        self._board.add(column, seconds, now)
        return ChosenReplica(replica.name, float(estimate.first_token[column]), start, chain.tokens - start)

    def close(self, request: str) -> None:
        """A request is over, or did not reach its replica. Reports do the same for all requests that are served."""
        booking = self._book.close(request)
        if booking is not None:
            self._unbook(booking)

    def leave(self, replica: str) -> None:
        """A replica is gone."""
        gone = self._replicas.pop(replica, None)
        if gone is not None:
            self._forget(gone)
            self._board.absent(gone.column)
            self._columns[gone.column] = None

    def holds(self, replica: str, key: BlockKey) -> frozenset[Tier]:
        """In which tiers a replica holds a block or checkpoint, as far as its reports say; empty for an unknown replica."""
        known = self._replicas.get(replica)
        return frozenset() if known is None else self._holdings.tiers(known.column, key)

    def status(self, now: float) -> tuple[ReplicaStatus, ...]:
        """What is known of each replica."""
        return tuple(
            ReplicaStatus(
                one.name,
                self._holdings.held(one.column),
                self._board.waiting(one.column, now),
                now - one.heard,
                one.order.gap,
            )
            for one in self._replicas.values()
        )

    def _enter(self, name: str) -> _Replica:
        if None in self._columns:
            column = self._columns.index(None)
        else:
            column = self._holdings.grow()
            self._board.grow()
            self._columns.append(None)
            self._given = np.append(self._given, 0.0)
        self._given[column] = min((self._given[one.column] for one in self._replicas.values()), default=0.0)
        replica = self._columns[column] = self._replicas[name] = _Replica(name, column)
        return replica

    def _forget(self, replica: _Replica) -> None:
        """The replica's process is gone, with what it held and what was sent to it."""
        for booking in self._book.of(replica.column):
            self._book.close(booking.request)
        self._holdings.clear(replica.column)

    def _at(self, column: Column) -> _Replica:
        replica = self._columns[column]
        assert replica is not None
        return replica

    def _reload(self, replica: _Replica) -> None:
        self._board.load(replica.column, replica.load, self._book.seconds(replica.column), replica.heard)

    def _unbook(self, booking: Booking) -> None:
        """A booking has ended without a report."""
        self._come(booking)
        self._reload(self._at(booking.column))

    def _come(self, booking: Booking | None) -> None:
        """The blocks of a booking are not coming any longer: they are there, or never will be."""
        if booking is not None:
            self._holdings.change(booking.column, {Tier.COMING: booking.keys}, {})
