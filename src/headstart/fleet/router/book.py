"""Book: the requests that a router has sent, until the replica's reports speak of them.

A *booking* holds two things. The seconds of prefill that the request adds to its replica's queue count until a report says that
the request arrived: from then on they are part of the reported load. The blocks that it will compute count as coming, until a
report says that its prefill is done. So two requests with the same new prefix go to the same replica, and a burst of requests
does not go to the one replica that was idle a moment ago.

A booking that no report ever speaks of ends by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from headstart.fleet.router.holdings import Column
from headstart.fleet.router.reports import BlockKey

ARRIVES = 30.0
"""Seconds after which a request that did not arrive is forgotten."""
PREFILLED = 3600.0
"""Seconds after which a request that arrived is taken as done."""

_SLACK = 1024


@dataclass(frozen=True, slots=True)
class Booking:
    """A request that was sent to a replica.

    Attributes:
        seconds: the prefill that it adds to the queue.
        keys: the blocks that it will compute.
    """

    request: str
    column: Column
    seconds: float
    keys: Sequence[BlockKey]


class Book:
    """The open bookings of a router."""

    def __init__(self) -> None:
        self._open: dict[str, Booking] = {}
        self._on_the_way: dict[Column, dict[str, float]] = {}
        self._due: dict[str, float] = {}
        self._dues: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, booking: Booking, now: float) -> None:
        self._open[booking.request] = booking
        self._on_the_way.setdefault(booking.column, {})[booking.request] = booking.seconds
        self._end_at(booking.request, now + ARRIVES)

    def seconds(self, column: Column) -> list[float]:
        """The prefill of each request that is on its way to a column."""
        return list(self._on_the_way.get(column, {}).values())

    def arrived(self, request: str, now: float) -> None:
        """A report says that the request arrived. Others than open bookings are ignored."""
        booking = self._open.get(request)
        if booking is not None and self._on_the_way[booking.column].pop(request, None) is not None:
            self._end_at(request, now + PREFILLED)

    def close(self, request: str) -> Booking | None:
        """Ends a booking: its prefill is done, or it failed. None if it is not open."""
        booking = self._open.pop(request, None)
        if booking is not None:
            self._on_the_way[booking.column].pop(request, None)
            del self._due[request]
        return booking

    def of(self, column: Column) -> list[Booking]:
        """The open bookings of a column."""
        return [booking for booking in self._open.values() if booking.column == column]

    def overdue(self, now: float) -> list[Booking]:
        """Ends all bookings whose time is over."""
        found = []
        while self._dues and self._dues[0][0] <= now:
            due, request = heapq.heappop(self._dues)
            if self._due.get(request) == due and (booking := self.close(request)) is not None:
                found.append(booking)
        return found

    def _end_at(self, request: str, due: float) -> None:
        self._due[request] = due
        heapq.heappush(self._dues, (due, request))
        if len(self._dues) > 2 * len(self._due) + _SLACK:  # most are of requests that are over
            self._dues = [(due, request) for request, due in self._due.items()]
            heapq.heapify(self._dues)
