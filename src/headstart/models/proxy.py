"""Proxy: passes requests on to the process of the model that they are for, and its answers back.

client ──▶ proxy ──(a connection of the pair of sockets)──▶ the model's process
            └── reads the body once, to see `model`; waits until the model is loaded

While a stream waits, it gets comments with the progress. Any other request just waits. If the client goes away, its connection
to the process is closed, and the process cancels the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from urllib.parse import quote

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headstart.api.body import loaded
from headstart.api.caller import caller_of
from headstart.api.errors import CLIENT_CLOSED, Forbidden, answer
from headstart.api.incoming import disconnected
from headstart.errors import HeadstartError, Unavailable
from headstart.models.choice import ModelChoice, choose
from headstart.models.front import ModelsFront
from headstart.models.passed import PassedKey
from headstart.models.passing import (
    PassedError,
    PassedEvents,
    answered_headers,
    passed_headers,
    stream_error,
    stream_headers,
    target,
)
from headstart.models.pool import Backend, Lease, LoadRefused, ModelGone
from headstart.models.upstream import AnswerHead, UpstreamConnection, UpstreamGone, request_head
from headstart.observe.logs import Figures

LAST_WORDS = 2.0
"""Seconds in which a process that closed a connection must be known to have ended."""


class PassedRoutes:
    """The routes that a model answers.

    Args:
        routers: all routes of a server of one model.
        own: the paths that the front answers itself.
    """

    def __init__(self, routers: Sequence[APIRouter], own: frozenset[str]) -> None:
        routes = [route for router in routers for route in router.routes if isinstance(route, Route) and route.path not in own]
        self._plain: dict[tuple[str, str], BaseRoute] = {}
        self._others = [route for route in routes if "{" in route.path]
        for route in routes:
            for method in route.methods or ():
                self._plain.setdefault((method, route.path), route)

    def find(self, scope: Scope) -> BaseRoute | None:
        """The route of a request, or None."""
        found = self._plain.get((scope["method"], scope["path"]))
        return found or next((route for route in self._others if route.matches(scope)[0] is Match.FULL), None)


class Proxy:
    """ASGI middleware: what no model answers goes to `app`.

    Args:
        front: what is served.
        routes: what a model answers.
    """

    def __init__(self, app: ASGIApp, front: ModelsFront, routes: PassedRoutes) -> None:
        self._app = app
        self._front = front
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.find(scope) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route  # its pattern is logged
        arrived = time.monotonic()
        try:
            body = await self._front.body(Request(scope, receive))
            value = await loaded(body) if body else {}
            query = Request(scope).query_params
            below = scope.get("model")
            choice = choose(self._front.names, scope["method"], scope["path"], query, value, below)
            if (answered := choice.routing.unloaded) is not None:
                self._unload(choice, scope)
                await JSONResponse(answered(choice.model.name))(scope, receive, send)
                return
            keep = choice.routing.keep if scope["operator"] else None  # as for loading and unloading by name
            pool = self._front.pool
            lease = pool.peek(choice.model) if choice.looks else pool.lease(choice.model, keep)
        except HeadstartError as error:
            await self._refuse(error, scope, receive, send)
            return
        except ClientDisconnect:
            await Response(status_code=CLIENT_CLOSED)(scope, receive, send)
            return
        call = PassedCall(self._front, scope, send, choice, lease, body, arrived)
        self._front.drain.calls.add(call)
        try:
            await call.run(receive)
        except HeadstartError as error:
            await self._refuse(error, scope, receive, send)
        finally:
            self._front.drain.calls.discard(call)
            lease.release()

    def _unload(self, choice: ModelChoice, scope: Scope) -> None:
        """Unloads a model when its running requests are over. Raises Forbidden if the caller may not."""
        if not scope["operator"]:
            raise Forbidden("Unloading a model needs the operator's key.")
        self._front.pool.unload(choice.model)

    async def _refuse(self, error: HeadstartError, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(error, LoadRefused) and scope["operator"]:
            error = error.for_operator
        response = answer(error, scope)
        self._front.refused(caller_of(scope), response.status_code, error)
        await response(scope, receive, send)


class PassedCall:
    """A request on its way: a `drain.Ending`."""

    def __init__(
        self, front: ModelsFront, scope: Scope, send: Send, choice: ModelChoice, lease: Lease, body: bytes, arrived: float
    ) -> None:
        self._front = front
        self._scope = scope
        self._send = send
        self._choice = choice
        self._lease = lease
        self._body = body
        self._arrived = arrived
        self._started = False
        self._events = PassedEvents() if scope["path"] == "/v1/responses" else None

    @property
    def running(self) -> bool:
        return self._lease.running

    def end(self, error: Unavailable) -> None:
        """The process of the model ends what runs there: it stops in the same time."""
        self._lease.fail(error)

    async def run(self, receive: Receive) -> None:
        """Waits for the model, and passes the request on. Raises HeadstartError if nothing has been sent to the client."""
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            process = await self._wait(gone)
            if process is None:
                self._front.unfinished(caller_of(self._scope), "abort", self._figures)
                return
            await self._exchange(process, gone)
        except HeadstartError as error:
            if not self._started:
                raise
            await self._end(error)
        finally:
            gone.cancel()

    async def _wait(self, gone: asyncio.Future[None]) -> Backend | None:
        """The process, when it is ready. None if the client goes away before. Raises HeadstartError."""
        granted, beat, framing = self._lease.granted, self._front.keep_alive / 2, self._choice.routing.framing
        while not granted.done():
            await asyncio.wait((granted, gone), timeout=beat, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return None
            if not granted.done() and framing is not None:
                await self._start(200, stream_headers(framing))
                await self._more(framing.silence(self._lease.progress))
        return granted.result()

    async def _exchange(self, process: Backend, gone: asyncio.Future[None]) -> None:
        try:
            connection = await process.connection()
        except OSError as error:
            raise await self._gone(process) from error

        def close(_: object) -> None:
            connection.close()

        gone.add_done_callback(close)
        try:
            head = await connection.ask(self._head, self._body)
            if self._started and head.status != 200:
                raise PassedError.of(head.status, b"".join([part async for part in connection.parts()]))
            await self._pass_back(head, connection)
        except UpstreamGone as error:
            if gone.done():
                return  # the process logs that its client has gone
            raise await self._gone(process) from error
        finally:
            gone.remove_done_callback(close)  # the connection is another request's next
            process.put_back(connection)

    async def _pass_back(self, head: AnswerHead, connection: UpstreamConnection) -> None:
        await self._start(head.status, answered_headers(head))
        async for part in connection.parts():
            if self._events is not None:
                self._events.add(part)
            await self._more(part)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def _head(self) -> bytes:
        scope = self._scope
        caller = PassedKey(scope["tenant"], scope["operator"], scope["expire"])
        client = scope["client"][0] if scope.get("client") else ""
        headers = passed_headers(
            scope["headers"],
            caller=bytes(caller),
            request_id=scope["request_id"],
            client=client,
            body=self._body if self._body or scope["method"] == "POST" else None,
        )
        return request_head(scope["method"], target(scope["path"], scope.get("query_string", b"")), headers)

    async def _gone(self, process: Backend) -> ModelGone:
        """The error of a request whose process has ended."""
        ends = time.monotonic() + LAST_WORDS
        while not process.ended and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        why = process.cause or "its process closed the connection"
        name = self._choice.model.name
        return ModelGone(f"The model '{name}' did not finish this answer: {why}. The next request loads it again.")

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _more(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self, error: HeadstartError) -> None:
        """Ends an answer that has begun."""
        scope = self._scope
        if not isinstance(error, PassedError):  # else the process has logged it
            self._front.unfinished(caller_of(scope), "error", self._figures, error)
        framing = self._choice.routing.framing
        if framing is None:
            return  # the server closes the connection, because the answer is incomplete
        if isinstance(error, LoadRefused) and scope["operator"]:
            error = error.for_operator
        events = self._events.count if self._events is not None else 0
        data = stream_error(scope["path"], framing, error, scope["request_id"], events)
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    @property
    def _figures(self) -> Figures:
        return Figures(seconds=time.monotonic() - self._arrived)


class PathOfModel:
    """ASGI middleware, outside of all others: `/upstream/NAME/…` is the rest of the path, at that model (`scope["model"]`)."""

    def __init__(self, app: ASGIApp, front: ModelsFront, below: str) -> None:
        self._app = app
        self._front = front
        self._below = below

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self._below):
            found = self._front.names.below(scope["path"][len(self._below) :])
            if found is not None:
                model, rest = found
                if not rest:  # the page's files have relative paths
                    location = quote(scope["path"].rpartition("/")[2]) + "/"
                    await Response(status_code=308, headers={"location": location})(scope, receive, send)
                    return
                scope = {**scope, "path": rest, "raw_path": rest.encode(), "model": model}
        await self._app(scope, receive, send)
