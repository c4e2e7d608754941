"""Route: calls an endpoint directly if its only parameter is the request."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Query
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

Salt = Annotated[str, Query(max_length=1024)]
"""A query parameter that is part of a salt."""
Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class Route(APIRoute):
    """A FastAPI route, without FastAPI's slow resolving of parameters where there is nothing to resolve."""

    def get_route_handler(self) -> Endpoint:
        endpoint: Endpoint = self.endpoint
        alone = [*inspect.signature(endpoint).parameters] == ["request"] and not self.dependencies
        return endpoint if alone else super().get_route_handler()
