"""Events: what the server does, as server-sent events. Each reader sees its own; the operator sees all."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Header
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from headstart.api.incoming import disconnected
from headstart.api.openapi import ERRORS, EVENTS
from headstart.api.route import Salt
from headstart.api.service import Service, service_of
from headstart.errors import Unavailable
from headstart.events.hub import RENEWED, EventReader, Hub, View

router = APIRouter()

SLOW = 30.0
"""Seconds after which a reader that takes nothing is given up."""
BUFFERED = 4 << 20, 600.0
"""Bytes of events, and seconds, after which a stream ends where nobody sees whether its reader takes anything, as behind a
front of a fleet. The reader comes back, maybe to another replica."""
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@router.get("/headstart/events", response_class=Response, responses={**ERRORS, **EVENTS})
async def events(
    request: HttpRequest,
    once: bool = False,
    cache_salt: Salt = "",
    user: Salt = "",
    last_event_id: Annotated[str, Header(max_length=128)] = "",
) -> Response:
    """Slots, the tree of what is stored, and requests, as they change. With `once`, only how they are now."""
    service = service_of(request)
    hub, view = service.hub, View(service.owner(request, user, cache_salt), request.scope["operator"])
    if once:
        parts = _each(await asyncio.to_thread(hub.once, view))  # one by one: together they may be hundreds of megabytes
        return StreamingResponse(parts, headers=HEADERS, media_type="text/event-stream")
    woken, loop = asyncio.Event(), asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(woken.set)

    reader, first = await asyncio.to_thread(hub.subscribe, view, wake, last_event_id)
    return EventFeed(service, hub, reader, first, woken)


@router.head("/headstart/events", include_in_schema=False)
async def head(request: HttpRequest) -> Response:
    """The headers of the stream. It takes no reader's place, and ends."""
    service_of(request)
    return Response(headers=HEADERS, media_type="text/event-stream")


class EventFeed(Response):
    """The answer to one reader. It ends when the reader is dropped, disconnects or takes nothing, or the server stops."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, hub: Hub, reader: EventReader, first: Sequence[bytes], woken: asyncio.Event) -> None:
        # Response.__init__ would set a content-length.
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._service = service
        self._hub = hub
        self._reader = reader
        self._first = first
        self._woken = woken

    running = False
    """For `drain.Ending`: a stopping server does not wait for readers."""

    def end(self, error: Unavailable) -> None:
        self._hub.end(self._reader)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        drain = self._service.drain
        drain.calls.add(self)
        gone = asyncio.create_task(_disconnected(receive, self._woken))
        try:
            if drain.begun:
                self._hub.end(self._reader)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for data in self._first:
                await _body(send, data)
            self._first = ()
            clock = asyncio.get_running_loop().time
            left, until = (BUFFERED[0], clock() + BUFFERED[1]) if scope.get("buffered") else (math.inf, math.inf)
            while not gone.done():
                beat = b""
                try:
                    async with asyncio.timeout(self._service.keep_alive / 2):
                        await self._woken.wait()
                except TimeoutError:
                    beat = b":\n\n"
                self._woken.clear()
                over = self._reader.over  # read before the rest is taken
                if data := self._reader.take() or beat:
                    await _body(send, data)
                    left -= len(data)
                if not over and (left <= 0 or clock() >= until):
                    await _body(send, RENEWED)
                    over = True
                if over:
                    await _body(send, b"", more=False)
                    return
        except TimeoutError:
            return
        finally:
            gone.cancel()
            drain.calls.discard(self)
            await asyncio.to_thread(self._hub.unsubscribe, self._reader)


async def _each(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def _body(send: Send, data: bytes, *, more: bool = True) -> None:
    """Sends a part. Raises TimeoutError if the reader takes nothing for long."""
    message: dict[str, Any] = {"type": "http.response.body", "body": data, "more_body": more}
    async with asyncio.timeout(SLOW):
        await send(message)


async def _disconnected(receive: Receive, woken: asyncio.Event) -> None:
    await disconnected(receive)
    woken.set()
