"""App: the HTTP server of several models as an ASGI app. It has the routes of a server of one model, and its outer layers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.routing import Route

from headstart.api import docs, models
from headstart.api.app import ROUTERS, assemble
from headstart.api.auth import Keys
from headstart.api.browsers import BrowserGuard
from headstart.api.dialects import READERS
from headstart.api.ollama import routes as ollama
from headstart.api.pulls import Pullers
from headstart.models import routes
from headstart.models.choice import BELOW
from headstart.models.front import ModelsFront
from headstart.models.proxy import PassedRoutes, PathOfModel, Proxy

_LISTED = [*routes.router.routes, *models.router.routes, *docs.router.routes, *ollama.router.routes]
HERE = frozenset({"/", *(route.path for route in _LISTED if isinstance(route, Route))}) - READERS.keys()
"""The paths that the front answers itself."""


def _others() -> APIRouter:
    """The routes of a server of one model, without those that the front has in their place."""
    replaced = {route.path for route in routes.router.routes if isinstance(route, Route)}
    found = APIRouter()
    for router in ROUTERS:
        found.routes += [route for route in router.routes if isinstance(route, Route) and route.path not in replaced]
    return found


def create_front(
    front: ModelsFront,
    *,
    keys: Keys,
    hosts: Sequence[str] = (),
    cors: Sequence[str] = (),
    page: bool = True,
    pullers: Pullers = "local",
) -> FastAPI:
    """The app of several models. It ends their processes at shutdown.

    Args:
        front: what is served.
        keys: requests need one of them.
        hosts, cors, page, pullers: as in `api.app.create_app`.

    Raises:
        ConfigError: an entry of `hosts` or `cors` has another form.
    """

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        front.open()
        try:
            yield
        finally:
            await front.close()

    app = assemble(
        front,
        (routes.router, _others()),
        life,
        keys=keys,
        guard=BrowserGuard(hosts, cors),
        cors=cors,
        page=page,
        pullers=pullers,
        inside=[Middleware(Proxy, front=front, routes=PassedRoutes(ROUTERS, HERE))],
    )
    app.add_middleware(PathOfModel, front=front, below=BELOW)
    plain = app.openapi
    app.openapi = lambda: _with_gone(plain())  # type: ignore[method-assign]
    return app


def _with_gone(document: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document with the status of requests whose model's process has ended. Idempotent."""
    here = {path.replace(":path}", "}") for path in HERE}
    for path in document["paths"].keys() - here:
        for operation in document["paths"][path].values():
            responses = operation["responses"]
            busy = responses.get("503") or responses["529"]
            responses["502"] = {**busy, "description": "The process of the model has ended; the next request loads it again."}
    return document
