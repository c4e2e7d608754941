"""Handler: serves a call of any dialect: parse the body → submit → encode the events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.caller import caller_of
from headstart.api.connection import Disconnected, EngineCall
from headstart.api.errors import CLIENT_CLOSED
from headstart.api.event_stream import EventStream, failed
from headstart.api.service import Service, service_of
from headstart.api.understood import Understood
from headstart.chat import tenancy
from headstart.serving.runtime import Runtime

SESSIONS = ("x-claude-code-session-id", "x-session-affinity", "x-session-id")
"""Headers in which clients send the id of a conversation."""

Understand = Callable[[Service, Runtime, HttpRequest, bytes], Understood | Response]
"""Parses a body. A response is the answer itself, to a body for which nothing is computed. Raises RequestError."""


async def answer(request: HttpRequest, understand: Understand) -> Response:
    """Serves one call.

    Raises RequestError: the body cannot be served, or the server stops before it is parsed.
    """
    arrived = time.monotonic()
    service = service_of(request)
    runtime = service.ready()
    data = await service.body(request)
    caller = caller_of(request.scope)
    call = EngineCall(
        runtime,
        request.receive,
        beat=service.keep_alive / 2,
        metrics=service.metrics,
        arrived=arrived,
        drain=service.drain,
    )

    def begin() -> Understood | Response:
        understood = understand(service, runtime, request, data)
        if isinstance(understood, Response):
            return understood
        understood.encoder.ignored = understood.body.ignored
        service.noted.note(understood.body.ignored, understood.body.known())
        tenant, session = request.scope.get("tenant", tenancy.OPEN), _session(request)
        call.submit(
            [
                replace(made, id=caller.id, tenant=tenancy.viewer_of(tenant, made.prompt.salt), session=session)
                for made in understood.requests
            ]
        )
        return understood

    # Parsing, rendering and tokenising take milliseconds. On the event loop all streams would wait for them.
    try:
        understood = await call.unless_ended(asyncio.to_thread(begin))
    except BaseException:
        call.abandon()
        raise
    if isinstance(understood, Response):
        call.abandon()
        return understood
    if understood.stream:
        return EventStream(call, understood, service, caller)
    try:
        async with call:
            while not call.done:
                for number, event in await call.take():
                    understood.encoder.take(number, event)
            if call.failure is not None:
                raise call.failure
            await asyncio.to_thread(understood.complete, service)
        summary = call.summary()
        whole = understood.encoder.whole(summary)
    except Disconnected:
        service.unfinished(caller, "abort", call.so_far())
        return Response(status_code=CLIENT_CLOSED)
    except Exception as error:
        return failed(service, caller, call, error, request.scope)
    service.finished(caller, summary, call.reasons, call.seconds)
    return JSONResponse(whole)


def _session(request: HttpRequest) -> str:
    """The client's id for the conversation, or "" without one."""
    return next((given for name in SESSIONS if (given := request.headers.get(name))), "")[:128]
