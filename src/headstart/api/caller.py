"""Caller: what the log records about the sender of a request."""

from __future__ import annotations

import re

from starlette.types import Scope

from headstart.chat import tenancy
from headstart.observe.logs import Caller

DIGITS = 12
"""Logged characters of a tenant's digest."""

_STRANGE = re.compile(r"[^\x21-\x7e]")
_LONGEST = 80
"""Logged characters of an unknown path."""


def caller_of(scope: Scope) -> Caller:
    """The caller of a request, from its ASGI scope."""
    return Caller(
        id=scope.get("request_id", ""),
        route=f"{scope['method']} {_route(scope)}",
        client=scope["client"][0] if scope.get("client") else "unix",
        tenant=scope.get("tenant", tenancy.OPEN)[:DIGITS],
    )


def _route(scope: Scope) -> str:
    """The route's pattern, because its parameters are the caller's data. For an unknown path, its printable characters."""
    declared = getattr(scope.get("route"), "path", None)
    return declared if isinstance(declared, str) else _STRANGE.sub("?", scope["path"][:_LONGEST])
