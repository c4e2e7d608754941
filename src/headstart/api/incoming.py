"""Incoming: what is read of a request before anything is understood of it: its id and its body."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive

from headstart.api.errors import TooLarge

MAX_BODY = 64 << 20
"""Most bytes of a body, by default."""
SMALL_BODY = 64 << 10
"""Most bytes of a body that only names something. It is parsed on the event loop."""
_SANE = re.compile(r"[\x21-\x7e]{1,128}")


def given_id(headers: Headers) -> str | None:
    """The id that the client has chosen for its request; None if there is none, or it cannot be used."""
    given = headers.get("x-request-id", "")
    return given if _SANE.fullmatch(given) else None


async def whole_body(request: Request, most: int) -> bytes:
    """The body of a request. Raises TooLarge, and ClientDisconnect."""
    refusal = TooLarge(f"The body is larger than {most} bytes.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise refusal
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise refusal
        parts.append(part)
    return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    """Returns when the caller of a request has gone. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
