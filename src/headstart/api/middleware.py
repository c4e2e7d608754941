"""Middleware: the outermost layer. It sets request ids, checks who asks, and answers unexpected errors."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.api.auth import OPERATOR, Keys, offered_keys
from headstart.api.browsers import BrowserGuard
from headstart.api.caller import caller_of
from headstart.api.errors import Forbidden, Unauthorized, WrongKey, answer
from headstart.api.incoming import given_id
from headstart.api.paths import canonical
from headstart.api.served import Served
from headstart.errors import RequestError
from headstart.observe.logs import Figures
from headstart.web import routes as web

OPEN = frozenset({"/", "/health", "/v1/health", "/docs", "/redoc"})
"""Routes that need no key."""

OPEN_BELOW = f"{web.ASSETS}/"
"""The page's files, which need none either."""

OF_ALL = ("/metrics", "/slots")
"""Routes with server-wide data, and all paths below them. With isolation on, only the operator may read them."""

ID_HEADERS = (b"x-request-id", b"request-id")
"""Headers in which OpenAI's and Anthropic's clients look for a request's id."""

MISSING = "This server needs an API key: send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'."
WRONG = "This API key is not known here. Send one that the server was given with --api-key or --api-key-file."


class HeadAsGet:
    """ASGI middleware: a HEAD is answered as a GET without its body. Everything inside sees a GET.

    Args:
        own: paths with a route of their own for HEAD.
    """

    def __init__(self, app: ASGIApp, own: Container[str]) -> None:
        self._app = app
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"] in self._own:
            await self._app(scope, receive, send)
            return

        async def bodiless(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        # A copy: the server looks at its own scope to know that no body follows.
        await self._app({**scope, "method": "GET"}, receive, bodiless)


class RequestMiddleware:
    """ASGI middleware. It adds to the scope: `request_id`, `tenant` (a digest), `operator` (a bool), and `expire` (the seconds
    for which the tenant's data may be kept, or None)."""

    def __init__(self, app: ASGIApp, service: Served, keys: Keys, guard: BrowserGuard) -> None:
        self._app = app
        self._service = service
        self._keys = keys
        self._guard = guard
        self._version = keys.version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The path that is checked must be the path that is routed.
        scope["path"] = canonical(scope["path"])
        headers = Headers(scope=scope)
        request_id = scope["request_id"] = given_id(headers) or self._service.new_id("req_")
        stamps = [(name, request_id.encode()) for name in ID_HEADERS]
        started = False

        async def stamped(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                closing = [(b"connection", b"close")] if self._service.drain.begun else []
                message["headers"] = [*message["headers"], *_unframed(message["headers"]), *stamps, *closing]
            await send(message)

        arrived = time.monotonic()
        with self._service.drain.request():
            try:
                refusal = self._admit(scope, headers)
                if refusal is not None:
                    self._service.refused(caller_of(scope), refusal.status, refusal)
                    await answer(refusal, scope)(scope, receive, stamped)
                    return
                await self._app(scope, receive, stamped)
            except Exception as error:
                structlog.get_logger("headstart.api").error("internal error", id=request_id, exc_info=error)
                figures = Figures(seconds=time.monotonic() - arrived)
                self._service.unfinished(caller_of(scope), "error", figures, error)
                if not started:  # else the server closes the connection, because the answer is incomplete
                    await answer(error, scope)(scope, receive, stamped)

    def _admit(self, scope: Scope, headers: Headers) -> RequestError | None:
        """Adds the caller to the scope. Returns the error if the caller may not use the route."""
        if (refusal := self._guard.refusal(scope["method"], headers)) is not None:
            return refusal
        path = scope["path"]
        if path in OPEN or path.startswith(OPEN_BELOW):
            scope["operator"] = not self._keys.closed
            return None
        offered = list(offered_keys(headers))
        key = self._keys.find(offered)
        if self._version != self._keys.version:
            self._version = self._keys.version
            self._service.keep()
        if key is None:
            return WrongKey(WRONG) if any(offered) else Unauthorized(MISSING)
        scope["tenant"], scope["expire"] = key.tenant, key.expire
        scope["operator"] = key.operator or not self._service.policy.isolates
        if not scope["operator"] and any(path == route or path.startswith(f"{route}/") for route in OF_ALL):
            return Forbidden(f"{path} shows data of all tenants: it needs the key named '{OPERATOR}' in --api-key-file.")
        return None


def _unframed(headers: Iterable[tuple[bytes, bytes]]) -> Sequence[tuple[bytes, bytes]]:
    """The headers that keep a page out of the frames of other sites; none for what is not a page."""
    kinds = {name: value for name, value in headers if name in (b"content-type", b"content-security-policy")}
    if not kinds.get(b"content-type", b"").startswith(b"text/html"):
        return ()
    policy = () if b"content-security-policy" in kinds else ((b"content-security-policy", b"frame-ancestors 'none'"),)
    return (b"x-frame-options", b"DENY"), *policy
