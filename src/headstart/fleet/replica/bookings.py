"""Bookings: under which ids the fronts have booked the requests that are on their way to a replica's engine.

A front makes the ids of its bookings itself. The id of a request may be the client's own, and clients send one twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Bookings:
    """Bookings by the ids of their requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: dict[str, list[str]] = {}

    @contextmanager
    def coming(self, request: str, booking: str) -> Iterator[None]:
        """For as long as a call is served: its request has this booking."""
        with self._lock:
            self._coming.setdefault(request, []).append(booking)
        try:
            yield
        finally:
            with self._lock:
                if booking in self._coming.get(request, ()):  # it did not reach the engine
                    self._remove(request, booking)

    def take(self, request: str) -> str | None:
        """The oldest booking of a request that reaches the engine; None if there is none, or another request took it."""
        with self._lock:
            known = self._coming.get(request)
            if known is None:
                return None
            booking = known[0]
            self._remove(request, booking)
            return booking

    def _remove(self, request: str, booking: str) -> None:
        known = self._coming[request]
        known.remove(booking)
        if not known:
            del self._coming[request]
