"""Edge: the outermost layer. Request ids, keys, and the last net under faults of our own."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.api.faults import Unauthorized, answer
from headstart.api.service import Service

OPEN = frozenset({"/health", "/v1/health"})
"""Routes that need no key."""

ID_HEADERS = (b"x-request-id", b"request-id")
"""Where OpenAI's clients look for a request's id, and where Anthropic's do."""

_SANE = re.compile(r"[\x21-\x7e]{1,128}")


def _spelled(key: str) -> list[bytes]:
    """The bytes that clients send for a key: beyond ASCII some write UTF-8 and others Latin-1."""
    found = [key.encode("utf-8", "surrogateescape")]
    with suppress(UnicodeEncodeError):
        found.append(key.encode("latin-1"))
    return found


class Edge:
    """ASGI middleware. `keys`: any of them opens the server; none means it is open."""

    def __init__(self, app: ASGIApp, service: Service, keys: Sequence[str] = ()) -> None:
        self._app = app
        self._service = service
        self._keys = [spelled for key in keys for spelled in _spelled(key)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _SANE.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope["request_id"] = request_id
        stamps = [(name, request_id.encode()) for name in ID_HEADERS]
        started = False

        async def stamped(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *stamps]
            await send(message)

        if not self._admits(scope["path"], next((value for name, value in headers.raw if name == b"authorization"), b"")):
            self._service.metrics.refused(401)
            await answer(Unauthorized("Give an API key: 'Authorization: Bearer <key>'."), scope)(scope, receive, stamped)
            return
        try:
            await self._app(scope, receive, stamped)
        except Exception as error:
            structlog.get_logger("headstart.api").exception("a fault of ours", id=request_id, path=scope["path"])
            if started:
                raise
            self._service.unfinished(request_id, "error", repr(error))
            await answer(error, scope)(scope, receive, stamped)

    def _admits(self, path: str, authorization: bytes) -> bool:
        if not self._keys or path in OPEN:
            return True
        scheme, _, key = authorization.partition(b" ")
        given = key.strip()
        # Every key is compared, so the time says nothing about which one came close.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)
