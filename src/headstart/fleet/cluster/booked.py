"""Booked: the front tells the replica under which id it has booked a request, in a header."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from headstart.api.incoming import given_id
from headstart.fleet.replica.bookings import Bookings

BOOKING = "x-serve-router-booking"
"""The header. HAProxy takes headers that begin with `x-serve-router-` from the front only, never from clients."""
_MADE = re.compile(r"[0-9a-f]{32}")


class TakesBookings:
    """ASGI middleware of a replica: notes the booking of each call for as long as the call is served."""

    def __init__(self, app: ASGIApp, bookings: Bookings) -> None:
        self._app = app
        self._bookings = bookings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = MutableHeaders(scope=scope) if scope["type"] == "http" else MutableHeaders()
        booking = headers.get(BOOKING, "")
        if not _MADE.fullmatch(booking):
            await self._app(scope, receive, send)
            return
        request = headers["x-request-id"] = given_id(headers) or f"req_{uuid.uuid4().hex}"
        with self._bookings.coming(request, booking):
            await self._app(scope, receive, send)
