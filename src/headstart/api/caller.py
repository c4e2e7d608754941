"""Caller: what the log says of whoever sent a request."""

from __future__ import annotations

import re

from starlette.types import Scope

from headstart.chat import tenancy
from headstart.observe.logs import Caller

DIGITS = 12
"""Of a tenant's digest."""

_STRANGE = re.compile(r"[^\x21-\x7e]")
_LONGEST = 80
"""Characters of a path that is no route's."""


def caller_of(scope: Scope) -> Caller:
    """Of a request's ASGI scope."""
    return Caller(
        id=scope.get("request_id", ""),
        route=f"{scope['method']} {_route(scope)}",
        client=scope["client"][0] if scope.get("client") else "unix",
        tenant=scope.get("tenant", tenancy.OPEN)[:DIGITS],
    )


def _route(scope: Scope) -> str:
    """A route as it is declared: what a caller puts into its place is not ours to tell. Of other paths, what can be shown."""
    declared = getattr(scope.get("route"), "path", None)
    return declared if isinstance(declared, str) else _STRANGE.sub("?", scope["path"][:_LONGEST])
