"""Route: an endpoint that takes nothing but the request gets it at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class Route(APIRoute):
    """A route that FastAPI describes. Where there is nothing for it to resolve it is not asked to, which takes time."""

    def get_route_handler(self) -> Endpoint:
        endpoint: Endpoint = self.endpoint
        alone = [*inspect.signature(endpoint).parameters] == ["request"] and not self.dependencies
        return endpoint if alone else super().get_route_handler()
